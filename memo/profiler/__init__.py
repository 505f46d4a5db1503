"""Measures what the planner needs to know, on the device that will train."""
