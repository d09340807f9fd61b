"""Files appear whole, or not at all."""

import errno
import json
import os
import resource
import stat
import threading

import pytest
import torch

from onebasin.tensors import files
from onebasin.tensors.files import (
    MAX_NESTING,
    check_nesting,
    check_regular,
    check_replaceable,
    check_writable,
    load_tensors,
    read_json,
    save_tensors,
    write_atomically,
    write_folder_atomically,
    write_torch,
)


def fail(path):
    if path.is_dir():
        (path / "half").write_text("half")
    else:
        path.write_text("half")
    raise RuntimeError("stopped")


def test_a_failed_write_leaves_what_was_there(tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("whole")
    folder.mkdir()
    (folder / "inside").write_text("whole")
    with pytest.raises(RuntimeError, match="stopped"):
        write_atomically(file, fail)
    with pytest.raises(RuntimeError, match="stopped"):
        write_folder_atomically(folder, fail, force=True)
    assert file.read_text() == (folder / "inside").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_folder_takes_the_place_of_another(tmp_path):
    folder = tmp_path / "folder"
    for text in ("first", "second"):
        write_folder_atomically(folder, lambda path, text=text: (path / "file").write_text(text), force=True)
    assert [path.read_text() for path in folder.iterdir()] == ["second"]


def test_a_folder_with_other_things_in_it_is_not_replaced(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine").write_text("mine")

    def write(path):
        (path / "file").write_text("new")

    with pytest.raises(ValueError, match="holds mine, which would be lost"):
        write_folder_atomically(folder, write, force=True)
    assert [path.name for path in folder.iterdir()] == ["mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    write_folder_atomically(folder, write, force=True, further=["mine"])
    assert [path.name for path in folder.iterdir()] == ["file"]
    (folder / "file").unlink()
    (folder / "file").mkdir()
    with pytest.raises(ValueError, match="holds file, which would be lost"):
        check_replaceable(folder, ["file"])


def test_permissions_are_those_of_ordinary_files(tmp_path):
    (tmp_path / "ordinary").write_text("")
    (tmp_path / "folder").mkdir()
    write_atomically(tmp_path / "ours", lambda path: path.write_text("") and None)
    write_folder_atomically(tmp_path / "our folder", lambda path: None)
    for ordinary, ours in (("ordinary", "ours"), ("folder", "our folder")):
        modes = [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in (ordinary, ours)]
        assert modes[0] == modes[1]


def test_threads_write_side_by_side(tmp_path):
    threads = [
        threading.Thread(target=save_tensors, args=(tmp_path / f"{n % 2}", {"w": torch.full((4,), n)}, {"n": n}))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("0", "1"):
        tensors, header = load_tensors(tmp_path / name)
        assert tensors["w"].tolist() == [header["n"]] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_refusals(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(".")
    (tmp_path / "dangling").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    for target, options, message in (
        (tmp_path / "link", {"folder": True, "force": True}, "is a link; give the name of the folder itself"),
        (tmp_path / "dangling", {}, "exists already"),
        (tmp_path / "pipe", {"force": True}, "not a file"),
        (tmp_path / "file", {}, "exists already"),
        (tmp_path / "file", {"folder": True}, "is a file; give the name of a folder"),
        (tmp_path, {}, "is a folder; give the name of a file"),
        (tmp_path / "none" / "file", {}, "does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            check_writable(target, **options)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_tensors(tmp_path / "missing")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_tensors(tmp_path / "file")


def test_only_files_with_an_end_are_read(tmp_path, monkeypatch):
    (tmp_path / "file").write_text('{"a": 1}')
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("file", "link"):
        check_regular(tmp_path / name)
        assert read_json(tmp_path / name) == {"a": 1}
    for name, message in (("pipe", "a pipe or a socket, not a file"), ("device", "is a device"), (".", "is a folder")):
        for read in (check_regular, read_json, load_tensors):
            with pytest.raises(ValueError, match=message):
                read(tmp_path / name)
    for name in ("missing", "file/inside"):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            check_regular(tmp_path / name)
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 4)
    with pytest.raises(ValueError, match="is larger than"):
        read_json(tmp_path / "file")


def nest(depth):
    content = {}
    for _ in range(depth):
        content = {"inside": [content]}
    return content


def test_what_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "file").write_text(json.dumps(nest(MAX_NESTING // 2 - 1)))
    assert read_json(tmp_path / "file") == nest(MAX_NESTING // 2 - 1)
    for text in (json.dumps(nest(MAX_NESTING // 2)), "[" * 100_000 + "]" * 100_000):
        (tmp_path / "file").write_text(text)
        with pytest.raises(ValueError, match="file is nested too deeply"):
            read_json(tmp_path / "file")
    endless = [[]]
    endless[0] += [endless, endless]
    with pytest.raises(ValueError, match="file is nested too deeply"):
        check_nesting(endless, "file")
    save_tensors(tmp_path / "tensors", {"w": torch.ones(2)}, {"groups": nest(MAX_NESTING)})
    with pytest.raises(ValueError, match=r"the header of .*tensors was not written by onebasin: .* is nested too deeply"):
        load_tensors(tmp_path / "tensors")


def test_a_full_disk_is_an_error_of_the_file(tmp_path):
    """A limit of the process stands for a full disk: writing fails in the middle."""
    large = torch.zeros(100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        for write in (
            lambda: save_tensors(tmp_path / "out", {"w": large}, {}),
            lambda: write_atomically(tmp_path / "out", lambda file: write_torch(file, {"w": large})),
            lambda: write_folder_atomically(tmp_path / "out", lambda folder: write_torch(folder / "a", {"w": large})),
        ):
            with pytest.raises(OSError, match="File too large") as caught:
                write()
            assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_equal_content_gives_equal_files(tmp_path):
    tensors = {name: torch.full((3,), number) for number, name in enumerate("abc")}
    header = {name: number for number, name in enumerate("rstuvw")}
    for name in map(str, range(8)):  # the library orders the header by chance
        save_tensors(tmp_path / name, tensors, header)
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1
    found, again = load_tensors(tmp_path / "0")
    assert again == header
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
