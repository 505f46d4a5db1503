"""A layer as data: its operations, and the order in which forward, recomputation and backward run them.

operations.py   the values that an operation reads, makes, and needs in backward
kinds.py        kinds of layers, as lists of operations
walk.py         the steps of operations on one tile of tokens; machines run them: memo.executor computes tensors,
                memo.estimate counts bytes
"""
