# Every target works on a bare machine with Python 3.11 and nothing else: it makes .venv if that is missing.
PYTHON ?= python3
PY := .venv/bin/python
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install demo test check bench pages notebooks docs wheel-check coverage avalanche mergekit clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[dev]'
	touch $@

demo: install
	$(PY) -m onebasin demo

test: install
	$(PY) -m pytest -n auto

check: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

bench: install
	$(PY) -m benchmarks.align --quick --shared --threads 1
	$(PY) -m benchmarks.steps --quick
	$(PY) -m benchmarks.growth --quick

# What scripts write into the pages: the API reference, outputs and pictures of code, the gallery.
pages: install
	$(PY) -m docs.make_api
	$(PY) -m docs.run_page docs/tutorial.md docs/gallery.md docs/coming-from.md docs/howto/*.md
	$(PY) -m docs.make_gallery

# Three pages as Jupyter notebooks in build/notebooks, each run top to bottom in a kernel within two minutes.
notebooks: .venv-docs/installed
	.venv-docs/bin/python -m docs.make_notebooks build/notebooks --run

# The site of this version, in build/site/VERSION. Sphinx refuses references to missing pages and headings, and every link of
# the built pages is followed. A venv of its own, so that the tests do not need Sphinx.
docs: .venv-docs/installed
	rm -rf build/site
	.venv-docs/bin/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env --doctree-dir build/doctrees docs build/site/$(VERSION)
	.venv-docs/bin/python docs/check_links.py build/site/$(VERSION)
	.venv-docs/bin/python docs/list_versions.py build/site
	@echo "the site: build/site/index.html"

.venv-docs/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cli,hf,docs]'
	touch $@

# The wheel, installed with each extra alone in an environment of its own: make wheel-check PYTHON=python3.12 EXTRAS="base cli" TORCH=2.11.0
wheel-check:
	$(PYTHON) .ci/check_wheel.py --extras "$(EXTRAS)" --torch "$(TORCH)"

# A venv of its own: the architectures need libraries that nothing else does.
coverage: .venv-coverage/installed
	.venv-coverage/bin/python -m benchmarks.coverage --out docs

.venv-coverage/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-coverage
	.venv-coverage/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch torchvision
	.venv-coverage/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[diffusers,timm,cli]' torch_geometric peft
	touch $@

# Likewise: Avalanche brings half a gigabyte with it.
avalanche: .venv-avalanche/installed
	.venv-avalanche/bin/python -m pytest tests/continual/test_avalanche.py

.venv-avalanche/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-avalanche
	.venv-avalanche/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch torchvision
	.venv-avalanche/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[avalanche]' pytest
	touch $@

# Likewise: mergekit, which our folders should go straight into, and PEFT, which it brings along.
mergekit: .venv-mergekit/installed
	.venv-mergekit/bin/python -m benchmarks.peer_mergekit .venv-mergekit/bin/mergekit-yaml --out results/mergekit.json
	.venv-mergekit/bin/python -m pytest tests/checkpoints/test_peft.py

.venv-mergekit/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-mergekit
	.venv-mergekit/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-mergekit/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mergekit pytest -e '.[cli]'
	touch $@

clean:
	rm -rf .venv .venv-docs .venv-coverage .venv-avalanche .venv-mergekit
