"""Memory-bound operations, one folder each: `reference` in plain torch, which CPUs run and kernels are held to, and
`triton`. `select_ops` chooses; nothing here imports Triton before it is asked for."""

from memo_kernels.ops import KERNELS, Ops, select_ops, wide_dtype

__all__ = ["KERNELS", "Ops", "select_ops", "wide_dtype"]
