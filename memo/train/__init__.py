"""The trainer: the only place where model, parallelism, data and checkpoints meet."""
