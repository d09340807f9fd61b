"""Data sets as tensors: digits that come with the package, and MNIST and CIFAR from torchvision's folder layout."""

from onebasin.datasets.downloads import cifar10, cifar100, mnist
from onebasin.datasets.embedded import digits

__all__ = ["cifar10", "cifar100", "digits", "mnist"]
