"""Measures the scratch memory that matrix products take from torch's allocator on this CPU, by running each once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
import torch._C._autograd as autograd
import torch._C._profiler as profiler
from torch import Tensor

from memo.estimate.program.products import Product, Scratch, uncounted


def scratch_on_this_cpu(dtype: torch.dtype) -> Scratch:
    """Scratch bytes of products of `dtype` with torch's number of threads, for memo.estimate.program.memory.

    A product is run the first time it is asked for, and its result is cached. It is 0 if there is not enough memory to
    run it (the step that follows reports that), and if torch no longer has the profiler that this needs.
    """
    if not hasattr(autograd, "_enable_profiler_legacy"):
        return uncounted
    return lambda product: _measured(product, dtype, torch.get_num_threads())


@cache
def _measured(product: Product, dtype: torch.dtype, num_threads: int) -> int:
    # A profiler belongs to its thread, so that one of the user's in this thread is not disturbed.
    with ThreadPoolExecutor(max_workers=1) as other_thread:
        try:
            return other_thread.submit(_run, product, dtype, num_threads).result()
        except RuntimeError:  # torch's allocator for CPUs has no error of its own
            return 0


@torch.no_grad()
def _run(product: Product, dtype: torch.dtype, num_threads: int) -> int:
    torch.set_num_threads(num_threads)
    multiply = _prepared(product, dtype)
    config = profiler._ExperimentalConfig()
    flags = (False, True, False, False, False)  # of what may be recorded, memory alone
    autograd._enable_profiler_legacy(profiler.ProfilerConfig(profiler.ProfilerState.CPU, *flags, config))
    try:
        result = multiply()
    finally:
        threads = autograd._disable_profiler_legacy()
    live = peak = 0
    for event in (event for events in threads for event in events if event.kind() == "memory_alloc"):
        live += event.cpu_memory_usage()
        peak = max(peak, live)
    return max(0, peak - result.nbytes)


def _prepared(product: Product, dtype: torch.dtype) -> Callable[[], Tensor]:
    """The product as memo.parallel.tensor and memo.executor.pieces compute it, on zeros."""
    rows, inner, columns = product.rows, product.inner, product.columns
    bias = torch.zeros(columns, dtype=dtype) if product.bias else None
    if product.kind == "forward":
        x, weight = torch.zeros(rows, inner, dtype=dtype), torch.zeros(columns, inner, dtype=dtype)
        return lambda: torch.nn.functional.linear(x, weight, bias)
    if product.kind == "weight gradient":
        gradient, x = torch.zeros(inner, rows, dtype=dtype), torch.zeros(inner, columns, dtype=dtype)
        return lambda: gradient.t() @ x
    gradient, weight = torch.zeros(rows, inner, dtype=dtype), torch.zeros(inner, columns, dtype=dtype)
    return lambda: gradient @ weight
