"""Facts about the kernels of --delta-backend fla, for checks."""

FLA_VERSION = (0, 6, 0)
"""The first version of fla-core that memo uses: what it computes and allocates was read and tried in this one."""
MOST_HEAD_DIM = 256
"""It holds the matrix of a head in four parts of 64 rows (fla/ops/common/chunk_delta_h.py)."""
WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))
"""From the first version of Triton to below the second fla-core refuses a backward on Hopper, unless tilelang is there
(fla/ops/common/chunk_o.py, chunk_bwd_dqkwg; fla-org/flash-linear-attention, issue 640)."""
