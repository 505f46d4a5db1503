"""Memory from planned addresses: the Python face of csrc/, which is built on first use."""
