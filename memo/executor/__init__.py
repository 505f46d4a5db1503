"""Obeys the swap plan: streams and events, rounding buffers, host pool, the engine between them."""
