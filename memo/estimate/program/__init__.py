"""Peak of allocated memory of one rank of memo, from a walk through the requests of one training step.

Each tensor is a name and a number of bytes in a ledger: nothing is run, and torch is not imported. Each file makes its
requests in the order of the code that runs (memo.model, memo.executor, memo.parallel) and of torch 2.13's kernels.
"""
