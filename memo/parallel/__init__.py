"""Tensor, context, pipeline and data parallelism, one file for each axis; callers pass the process groups.

Terms:

shard            the part of the global weights that a rank's parameter holds (shards.py)
bucket           parameters in one flat buffer, whose gradients are reduced together (memo.spec.buckets)
unit             the buckets of one layer, of the embedding or of the head (units.py)
main gradient    the sum of a parameter's gradients over microbatches, in the wide dtype (main_gradients.py)
wide dtype       fp32, or fp64 for fp64 models (memo_kernels.wide_dtype)
"""
