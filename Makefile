# Every target works on a bare machine with Python 3.11 and nothing else: it makes .venv if that is missing.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install demo test check bench clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[dev]'
	touch $@

demo: install
	$(PY) -m onebasin.demo

test: install
	$(PY) -m pytest

check: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

bench: install
	$(PY) -m benchmarks.apply

clean:
	rm -rf .venv
