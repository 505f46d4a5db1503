"""Softmax over logits, of which this rank holds a slice: its sums and its gradient."""
