"""Memory from planned addresses: the Python interface of csrc/, which is built on first use."""
