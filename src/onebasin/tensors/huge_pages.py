"""Memory of new tensors in huge pages, where the system has them."""

import ctypes
import mmap

from torch import Tensor

_SMALLEST_BYTES = 1 << 21  # one huge page of x86-64, and of most others


def ask_for_huge_pages(tensor: Tensor) -> None:
    """Have Linux map a new tensor on the CPU in pages of 2 MB instead of 4 kB, as NumPy does for its arrays.

    New memory is mapped page by page when it is first written to, which takes longer than copying into it. Call this
    before the tensor is filled. It is a hint: the contents stay, and small tensors and other systems are left alone.
    """
    if tensor.nbytes < _SMALLEST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
