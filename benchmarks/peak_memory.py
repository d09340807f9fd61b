"""Peak memory on the CPU, where PyTorch keeps no count: what new tensors hold, until they die."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Within it, `peak` is the most bytes that tensors made since then have held at a time."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):  # what comes from outside was there before
            if isinstance(tensor, torch.Tensor):
                self._seen.add(tensor.untyped_storage().data_ptr())
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._seen:
            self._seen.add(address)
            self.live += size
            weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.live -= size
