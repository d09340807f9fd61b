"""An aligned folder goes straight into mergekit, where that is installed (``make mergekit``)."""

import os
import shutil

import pytest

COMMAND = os.environ.get("MERGEKIT") or shutil.which("mergekit-yaml")


@pytest.mark.skipif(COMMAND is None, reason="mergekit is not installed")
def test_aligned_folders_merge_to_the_first_network(tmp_path):
    for library in ("transformers", "typer"):
        pytest.importorskip(library)
    from benchmarks.peer_mergekit import run

    assert COMMAND is not None
    record = run(COMMAND, tmp_path)
    assert record["equal_tensors_aligned"] == record["tensors"]
    assert record["outputs_differ_aligned"] == 0.0
    assert record["outputs_differ_as_they_are"] > 0.1
    assert "config.json" in record["files"]
