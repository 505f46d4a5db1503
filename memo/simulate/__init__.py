"""Step time before any step: costs of kernels and collectives, and the schedule that the runtime executes, in time.

Pure functions of a RunConfig that `memo.config.checks.check` has accepted, and of a `Hardware`; nothing here
imports torch.
"""

from memo.simulate.predict import StepPrediction, predict_step

__all__ = ["StepPrediction", "predict_step"]
