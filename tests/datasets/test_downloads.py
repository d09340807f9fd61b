"""MNIST and CIFAR in torchvision's layout."""

import gzip
import hashlib
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from onebasin import datasets
from onebasin.datasets import downloads


def idx(array: np.ndarray) -> bytes:
    return np.array([0x0800 + array.ndim, *array.shape], ">i4").tobytes() + array.astype(np.uint8).tobytes()


def cifar_pickle(num: int, labels: bytes) -> bytes:
    rng = np.random.default_rng(0)
    return pickle.dumps({b"data": rng.integers(0, 256, (num, 3072), np.uint8), labels: [i % 10 for i in range(num)]}, 3)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny files in torchvision's layout, and their md5 in place of the originals'."""
    rng = np.random.default_rng(0)
    files = {
        "MNIST/raw/train-images-idx3-ubyte.gz": gzip.compress(idx(rng.integers(0, 256, (6, 28, 28)))),
        "MNIST/raw/train-labels-idx1-ubyte.gz": gzip.compress(idx(np.arange(6))),
        "MNIST/raw/t10k-images-idx3-ubyte": idx(rng.integers(0, 256, (4, 28, 28))),
        "MNIST/raw/t10k-labels-idx1-ubyte": idx(np.arange(4)),
        **{f"cifar-10-batches-py/data_batch_{i}": cifar_pickle(3, b"labels") for i in range(1, 6)},
        "cifar-10-batches-py/test_batch": cifar_pickle(2, b"labels"),
        "cifar-100-python/train": cifar_pickle(5, b"fine_labels"),
        "cifar-100-python/test": cifar_pickle(4, b"fine_labels"),
    }
    sums = {}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
        sums[name.removesuffix(".gz")] = (hashlib.md5(content).hexdigest(),)
    monkeypatch.setattr(downloads, "_MD5", sums)
    monkeypatch.setattr(downloads, "_MNIST_URL", "http://localhost:9/")  # nothing listens there
    monkeypatch.setattr(downloads, "_CIFAR_URL", "http://localhost:9/")
    return tmp_path


def test_torchvisions_layout_is_read(root: Path, monkeypatch: pytest.MonkeyPatch):
    images, labels = datasets.mnist("train", root)
    assert images.shape == (6, 1, 28, 28)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert datasets.mnist("test", root)[0].shape == (4, 1, 28, 28)
    assert datasets.cifar10("train", root)[0].shape == (15, 3, 32, 32)
    assert datasets.cifar10("test", root)[1].tolist() == [0, 1]
    monkeypatch.setenv("ONEBASIN_DATA", str(root))
    assert datasets.cifar100("test")[1].dtype == torch.int64


def test_rows_of_cifar_are_channels_then_rows(root: Path):
    stored = pickle.loads((root / "cifar-100-python/test").read_bytes())[b"data"]
    assert torch.equal(datasets.cifar100("test", root)[0].flatten(1), torch.from_numpy(stored))


def test_no_folder_and_no_network_are_said_clearly(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ONEBASIN_DATA", raising=False)
    with pytest.raises(ValueError, match="ONEBASIN_DATA"):
        datasets.mnist()
    (root / "cifar-100-python/train").unlink()
    with pytest.raises(FileNotFoundError, match="cannot be reached"):
        datasets.cifar100("train", root)


def test_other_content_is_refused_before_it_is_unpickled(root: Path, tmp_path: Path):
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (marker.touch, ())

    (root / "cifar-100-python/test").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="md5 differs"):
        datasets.cifar100("test", root)
    with pytest.raises(pickle.UnpicklingError, match="does not belong"):
        downloads._parse_cifar(pickle.dumps(Evil()), b"labels")
    assert not marker.exists()


def test_missing_files_are_downloaded(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = tmp_path / "server"
    server.mkdir()
    with tarfile.open(server / "cifar-100-python.tar.gz", "w:gz") as tar:
        for split in ("train", "test"):
            tar.add(root / "cifar-100-python" / split, f"cifar-100-python/{split}")
    shutil.copy(root / "MNIST/raw/train-labels-idx1-ubyte.gz", server)
    monkeypatch.setattr(downloads, "_MNIST_URL", server.as_uri() + "/")
    monkeypatch.setattr(downloads, "_CIFAR_URL", server.as_uri() + "/")
    expected = datasets.mnist("train", root)[1], datasets.cifar100("train", root)[0]
    (root / "MNIST/raw/train-labels-idx1-ubyte.gz").unlink()
    shutil.rmtree(root / "cifar-100-python")
    assert torch.equal(datasets.mnist("train", root)[1], expected[0])
    assert torch.equal(datasets.cifar100("train", root)[0], expected[1])
