from dataclasses import fields
from pathlib import Path

from onebasin.cli.aligned_folders import AlignedFolders
from onebasin.cli.merging import MergeRequest
from onebasin.cli.saved_elements import ElementFolder


def request(**given):
    return MergeRequest(**{field.name: given.get(field.name) for field in fields(MergeRequest)})


def test_mergekit_writes_the_merge_and_this_command_all_else():
    saved, report = ElementFolder(Path("s"), ("a.safetensors",)), Path("r.html")
    alone = request(out=Path("m"), saved=saved, report=report)
    assert alone.paths == alone.written == [Path("m"), Path("s"), report]
    aligned = AlignedFolders(Path("m"), [Path("a"), Path("b")])
    merge = request(out=Path("m"), aligned=aligned, report=report)
    assert merge.paths == [Path("m"), Path("m-aligned-2"), Path("m.mergekit.yaml"), report]
    assert merge.written == [Path("m-aligned-2"), report]
