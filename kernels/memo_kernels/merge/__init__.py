"""Merging partial attention into running output and log-sum-exp (ring attention, https://arxiv.org/abs/2310.01889)."""
