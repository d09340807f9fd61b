from pathlib import Path

import pytest

from onebasin.cli.aligned_folders import AlignedFolders


@pytest.mark.parametrize(("changes", "written"), [(False, ["m-aligned-2"]), (True, ["m-aligned-1", "m-aligned-2"])])
def test_models_that_change_are_written_beside_the_output(changes, written):
    folders = AlignedFolders(Path("x/m"), [Path("a"), Path("b")], changes)
    assert folders.written == [Path("x", name) for name in written]
    assert folders.places[-1] == Path("x/m-aligned-2")
    assert (folders.places[0] == Path("a")) == (not changes)
    assert folders.configuration == Path("x/m.mergekit.yaml")
