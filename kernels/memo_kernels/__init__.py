"""Memory-bound operations, one folder each: `reference` in plain torch, which CPUs run and tests compare kernels with,
and `triton`. `select_ops` chooses; only its choice of Triton imports Triton."""

from memo_kernels.ops import KERNELS, Ops, select_ops, wide_dtype

__all__ = ["KERNELS", "Ops", "select_ops", "wide_dtype"]
