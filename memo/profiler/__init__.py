"""Measures times, rates and memory for the planner, on the device that will train."""
