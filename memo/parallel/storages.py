"""Follows the storages that torch code allocates: when each is allocated and when it is freed."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMode(TorchDispatchMode):
    """Calls `begin` and `end` for every new storage among the tensors that operations return.

    Storages of `existing` tensors and of earlier calls are not followed, nor is scratch memory inside kernels, which no
    operation returns.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._live: dict[int, int] = {}  # address of a storage's handle -> number
        self._outside = {_handle(tensor) for tensor in existing}
        self._next_number = 0

    def begin(self, number: int, num_bytes: int) -> None:
        """Called when a storage is allocated; numbers count from 0."""
        raise NotImplementedError

    def end(self, number: int) -> None:
        """Called when the storage of this number is freed."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage, handle = tensor.untyped_storage(), _handle(tensor)
        if handle in self._outside or handle in self._live or storage.nbytes() == 0:
            return
        number = self._live[handle] = self._next_number
        self._next_number += 1
        self.begin(number, storage.nbytes())
        weakref.finalize(storage, self._forget, handle, number)

    def _forget(self, handle: int, number: int) -> None:
        if self._live.get(handle) == number:
            del self._live[handle]
            self.end(number)


class LiveBytes(StorageMode):
    """Counts the bytes of storages.

    Attributes:
        now, peak: bytes of live storages, now and at the most since the beginning or `restart`.
        made: bytes of all storages that were allocated.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__(existing)
        self.now = self.peak = self.made = 0
        self._sizes: dict[int, int] = {}

    def begin(self, number: int, num_bytes: int) -> None:
        self._sizes[number] = num_bytes
        self.now += num_bytes
        self.made += num_bytes
        self.peak = max(self.peak, self.now)

    def end(self, number: int) -> None:
        self.now -= self._sizes.pop(number)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now


def _handle(tensor: Tensor) -> int:
    handle: int = tensor.untyped_storage()._cdata
    return handle
