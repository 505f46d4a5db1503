"""Records the memory requests of code that runs on shapes alone, without data, kernels or memory.

The result is an estimate, because scratch memory inside kernels does not show. The sizes and the order of all other
requests are exact, because the same code runs.
"""

from typing import Any

import torch
from torch import Tensor

from memo.artifacts.memory_trace import Event, Free, Malloc, Phase, Trace
from memo.parallel.storages import StorageMode
from memo_kernels import wide_dtype


class FakeRecorder(StorageMode):
    """Records when every new storage of fake tensors is allocated and freed.

    Use it inside of torch's FakeTensorMode; `phase` is called as in memo.executor.phases. Storages from before the
    first phase, such as weights, are not recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._phases: list[tuple[str, int, int, list[Event]]] = []
        self._first_number = 0

    def phase(self, kind: str, layer: int, microbatch: int) -> None:
        if not self._phases:
            self._first_number = self._next_number
        self._phases.append((kind, layer, microbatch, []))

    def trace(self, run: dict[str, Any]) -> Trace:
        phases = tuple(
            Phase(kind, layer, microbatch, tuple(events)) for kind, layer, microbatch, events in self._phases
        )
        return Trace("cpu", "fake", phases, run)

    def begin(self, number: int, num_bytes: int) -> None:
        if self._phases:
            self._phases[-1][3].append(Malloc(number, num_bytes))

    def end(self, number: int) -> None:
        if self._phases and number >= self._first_number:
            self._phases[-1][3].append(Free(number))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The host reads how many rows each expert of a mixture has: on paper none, and what holds all rows has its size
        # anyway.
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        return super().__torch_dispatch__(func, types, args, kwargs)


def fake_mode() -> Any:
    """torch's mode in which tensors have shapes but no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    return FakeTensorMode(allow_non_fake_inputs=True)


class FakeGradients:
    """Parameters without data, and their gradients in fp32 (fp64 for fp64) as in memo.parallel.data.

    Make it inside of fake_mode; it replaces the parameters of `model`.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._main: dict[Tensor, Tensor] = {}
        given: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for module in model.modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in given:
                    given[parameter] = self._add(parameter, dtype)
                setattr(module, key, given[parameter])

    def main_gradient(self, parameter: torch.nn.Parameter) -> Tensor | None:
        return self._main.get(parameter)

    def gradient_done(self, parameter: torch.nn.Parameter) -> None:
        pass

    def _add(self, parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
        new = torch.nn.Parameter(torch.empty(parameter.shape, dtype=dtype), requires_grad=parameter.requires_grad)
        if not new.requires_grad:
            return new
        self._main[new] = torch.empty(parameter.shape, dtype=wide_dtype(dtype))
        new.register_post_accumulate_grad_hook(self._accumulate)
        return new

    def _accumulate(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._main[parameter].add_(parameter.grad)
        parameter.grad = None
