"""Native code is added here; everything else is in pyproject.toml."""

from setuptools import setup

setup()
