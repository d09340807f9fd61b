from pathlib import Path

from onebasin.cli.aligned_folders import AlignedFolders
from onebasin.cli.merging import MergePlaces
from onebasin.cli.saved_elements import ElementFolder


def test_mergekit_writes_the_merge_and_this_command_all_else():
    saved, report = ElementFolder(Path("s"), ("a.safetensors",)), Path("r.html")
    alone = MergePlaces(Path("m"), None, saved, report)
    assert alone.paths == alone.written == [Path("m"), Path("s"), report]
    aligned = AlignedFolders(Path("m"), [Path("a"), Path("b")])
    places = MergePlaces(Path("m"), aligned, None, report)
    assert places.paths == [Path("m"), Path("m-aligned-2"), Path("m.mergekit.yaml"), report]
    assert places.written == [Path("m-aligned-2"), report]
