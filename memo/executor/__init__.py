"""Runs the swap plan: streams and events, rounding buffers, host memory, and the engine that joins them."""
