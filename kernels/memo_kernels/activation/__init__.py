"""GELU (exact and by tanh) and SwiGLU."""
