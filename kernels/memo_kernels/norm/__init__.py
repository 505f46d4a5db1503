"""LayerNorm and RMSNorm over the last dim, alone or of a sum."""
