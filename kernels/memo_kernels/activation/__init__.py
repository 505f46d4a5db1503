"""GELU (exact and by tanh), SwiGLU and GeGLU."""
