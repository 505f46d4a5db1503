"""Facts about a run, each said once: shapes, parameters, buckets, placements, schedules, orders of operations.

Nothing here imports torch, decides anything, or prices anything. The planner decides with these facts, the estimates
and the simulator count with them, and the model, the parallel runtime and the executor are built from them.
"""
