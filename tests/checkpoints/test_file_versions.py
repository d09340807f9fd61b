import os

import pytest

from onebasin.checkpoints.file_versions import FileVersion


def test_a_file_that_changed_is_refused(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"one")
    version = FileVersion.of(file)
    version.check()
    os.utime(file, ns=(1, 1))
    with pytest.raises(ValueError, match="was changed while it was read"):
        version.check()
