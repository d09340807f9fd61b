from pathlib import Path

import fsspec
import pytest

from onebasin.checkpoints import remote_files
from onebasin.checkpoints.remote_files import RemoteFile, is_remote, write_url


@pytest.fixture
def store():
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/file", bytes(range(10)))
    yield memory
    memory.rm("/bucket", recursive=True)


def test_paths_keep_what_is_needed_of_a_url(tmp_path, monkeypatch):
    for url in ("s3://bucket/a b", "memory://x", "file:///models/x"):
        assert is_remote(url)
        assert write_url(Path(url)) == url
    monkeypatch.chdir(tmp_path)
    assert not any(map(is_remote, ["a/b", "/a", "C:/a", "a:b", ""]))
    (tmp_path / "s3:").mkdir()
    (tmp_path / "s3:" / "own").touch()
    assert not is_remote("s3:/own")


def test_bytes_are_read_in_pieces(store, monkeypatch):
    monkeypatch.setattr(remote_files, "_PIECE", 3)
    file, buffer = RemoteFile.of("memory://bucket/file"), bytearray(7)
    file.check()
    file.read(2, memoryview(buffer))
    assert buffer == bytes(range(2, 9))
    with pytest.raises(ValueError, match="became shorter"):
        file.read(8, memoryview(buffer))


def test_a_file_that_was_changed_is_not_read_on(store):
    file = RemoteFile.of("memory://bucket/file")
    store.pipe("/bucket/file", bytes(10))
    with pytest.raises(ValueError, match="memory://bucket/file was changed while it was read"):
        file.check()


def test_errors_name_the_url(store, monkeypatch):
    with pytest.raises(FileNotFoundError, match="there is no file or folder memory://bucket/none"):
        RemoteFile.of("memory://bucket/none")
    with pytest.raises(ValueError, match=r"cannot read nowhere://x: Protocol not known: nowhere\. See what pip package"):
        RemoteFile.of("nowhere://x")
    file = RemoteFile.of("memory://bucket/file")

    def refuse(*_):
        raise RuntimeError("no credentials\nand more")

    monkeypatch.setattr(store, "cat_file", refuse)
    with pytest.raises(OSError, match=r"cannot read memory://bucket/file: RuntimeError no credentials$"):
        file.read(0, memoryview(bytearray(1)))


def test_a_store_whose_package_is_missing_is_named(monkeypatch):
    def refuse(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(ValueError, match="cannot read s3://bucket/x: Install s3fs to access S3"):
        RemoteFile.of("s3://bucket/x")
