"""MNIST and CIFAR from torchvision's folder layout, checked by md5, and downloaded where they are missing."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import tarfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebasin.datasets.embedded import Split, check_split
from onebasin.tensors.files import write_atomically

_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"
# The md5 of every file we read; of MNIST's both the compressed and the plain one.
_MD5: Mapping[str, tuple[str, ...]] = {
    "MNIST/raw/train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    "MNIST/raw/train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    "MNIST/raw/t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    "MNIST/raw/t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    "cifar-10-batches-py/data_batch_1": ("c99cafc152244af753f735de768cd75f",),
    "cifar-10-batches-py/data_batch_2": ("d4bba439e000b95fd0a9bffe97cbabec",),
    "cifar-10-batches-py/data_batch_3": ("54ebc095f3ab1f0389bbae665268c751",),
    "cifar-10-batches-py/data_batch_4": ("634d18415352ddfa80567beed471001a",),
    "cifar-10-batches-py/data_batch_5": ("482c414d41f54cd18b22e5b47cb7c3cb",),
    "cifar-10-batches-py/test_batch": ("40351d587109b95175f43aff81a1287e",),
    "cifar-100-python/train": ("16019d7e3df5f24257cddd939b257f8d",),
    "cifar-100-python/test": ("f0ef6b0ae62326f3e7ffdfab6717acfc",),
}


def mnist(split: Split = "train", root: str | os.PathLike[str] | None = None) -> tuple[Tensor, Tensor]:
    """Handwritten digits (LeCun et al.): images (N, 1, 28, 28), uint8, and labels (N,), int64.

    Args:
        split: "train" (60,000) or "test" (10,000).
        root: the folder that holds ``MNIST/raw``; if None, the environment variable ``ONEBASIN_DATA``. Files that are
            missing there are downloaded.

    >>> from onebasin.datasets import mnist
    >>> images, labels = mnist("test", root="data")  # doctest: +SKIP
    """
    check_split(split)
    part = "train" if split == "train" else "t10k"
    images = _read(f"MNIST/raw/{part}-images-idx3-ubyte", root)
    labels = _read(f"MNIST/raw/{part}-labels-idx1-ubyte", root)
    return _parse_idx(images, 3).unsqueeze(1), _parse_idx(labels, 1).long()


def cifar10(split: Split = "train", root: str | os.PathLike[str] | None = None) -> tuple[Tensor, Tensor]:
    """Photographs of ten kinds of things (Krizhevsky 2009): images (N, 3, 32, 32), uint8, and labels (N,), int64.

    Args:
        split: "train" (50,000) or "test" (10,000).
        root: as in `mnist`; the folder that holds ``cifar-10-batches-py``.

    >>> from onebasin.datasets import cifar10
    >>> images, labels = cifar10("test", root="data")  # doctest: +SKIP
    """
    check_split(split)
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    parts = [_parse_cifar(_read(f"cifar-10-batches-py/{name}", root), b"labels") for name in names]
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def cifar100(split: Split = "train", root: str | os.PathLike[str] | None = None) -> tuple[Tensor, Tensor]:
    """Photographs of a hundred kinds of things, as `cifar10`, with the fine labels.

    >>> from onebasin.datasets import cifar100
    >>> images, labels = cifar100("test", root="data")  # doctest: +SKIP
    """
    check_split(split)
    return _parse_cifar(_read(f"cifar-100-python/{split}", root), b"fine_labels")


def _read(name: str, root: str | os.PathLike[str] | None) -> bytes:
    """The bytes of one file, found or downloaded, and checked before anything looks into them."""
    folder = root if root is not None else os.environ.get("ONEBASIN_DATA")
    if folder is None:
        raise ValueError("where are the data sets? give root=, or set the environment variable ONEBASIN_DATA")
    path = Path(folder, name)
    candidates = [path, path.with_name(path.name + ".gz")]
    found = next((p for p in candidates if p.is_file()), None)
    if found is None:
        found = _download(name, Path(folder))
    content = found.read_bytes()
    if hashlib.md5(content, usedforsecurity=False).hexdigest() not in _MD5[name]:
        raise ValueError(f"{found} is not the original file: its md5 differs. Remove it, and it will be downloaded again")
    return gzip.decompress(content) if found.suffix == ".gz" else content


def _download(name: str, root: Path) -> Path:
    """Fetch a file, or the archive it comes in, and put it where torchvision would."""
    is_mnist = name.startswith("MNIST")
    archive = f"{Path(name).name}.gz" if is_mnist else f"{name.split('-')[0]}-{name.split('-')[1]}-python.tar.gz"
    url = (_MNIST_URL if is_mnist else _CIFAR_URL) + archive
    try:
        with urllib.request.urlopen(url, timeout=20) as response:
            content = response.read()
    except OSError as error:
        raise FileNotFoundError(
            f"{name} is not under {root}, and {url} cannot be reached ({error}): put the file there by hand"
        ) from error
    members = {f"{name}.gz": content} if is_mnist else _members(content)
    for member, data in members.items():
        target = root / member
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, lambda file, data=data: _write(file, data))
    return root / (f"{name}.gz" if is_mnist else name)


def _write(file: Path, data: bytes) -> None:
    file.write_bytes(data)


def _members(archive: bytes) -> dict[str, bytes]:
    """The files of a CIFAR archive that we read."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        files = {name: tar.extractfile(name) for name in tar.getnames() if name in _MD5}
        return {name: file.read() for name, file in files.items() if file is not None}


def _parse_idx(content: bytes, num_dims: int) -> Tensor:
    """MNIST's format: a magic number, the sizes as big-endian integers, bytes."""
    header = np.frombuffer(content, ">i4", count=1 + num_dims)
    if header[0] != 0x0800 + num_dims:
        raise ValueError(f"expected {num_dims}-dimensional bytes in MNIST's format, got the magic number {header[0]:#x}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 * (1 + num_dims)).reshape(header[1:]).copy())


class _ArraysOnly(pickle.Unpickler):
    """Unpickles numpy arrays and plain containers: nothing else that a file may name is run."""

    def find_class(self, module: str, name: str) -> Any:
        """The three names that an array needs."""
        allowed = {"_reconstruct": np.zeros(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}
        if module.split(".")[0] == "numpy" and name in allowed:
            return allowed[name]
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a file of images")


def _parse_cifar(content: bytes, labels: bytes) -> tuple[Tensor, Tensor]:
    stored = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    images = torch.from_numpy(np.asarray(stored[b"data"], np.uint8).reshape(-1, 3, 32, 32).copy())
    return images, torch.tensor(stored[labels])
