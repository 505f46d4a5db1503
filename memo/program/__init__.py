"""A layer, written once: its operations, and the order in which forward, rebuilding and backward run them.

operations.py   what an operation reads and makes, and what its backward needs
kinds.py        kinds of layers, as lists of operations
walk.py         the steps of a run of operations on one tile of tokens; machines run them: memo.executor in numbers,
                memo.estimate in bytes
"""
