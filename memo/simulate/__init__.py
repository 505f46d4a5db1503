"""Predict the time of a step before any step runs, from the costs of kernels and collectives and from the schedule.

Pure functions of a RunConfig that `memo.config.checks.check` has accepted, and of a `Hardware`; nothing here
imports torch.
"""

from memo.simulate.predict import StepPrediction, predict_step

__all__ = ["StepPrediction", "predict_step"]
