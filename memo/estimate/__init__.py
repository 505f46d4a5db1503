"""Estimates from the configuration alone: memory, step time, admission.

These are pure functions of a RunConfig that `memo.config.checks.check` has accepted and whose vocab_size is resolved;
nothing here imports torch.
"""
