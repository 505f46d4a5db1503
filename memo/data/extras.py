"""Packages that only some files need."""

import importlib
from typing import Any

from memo.errors import ConfigError


def pyarrow(path: str, module: str = "pyarrow") -> Any:
    """The package pyarrow, or a module of it, to read `path`. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{path} needs the package pyarrow, which is not installed: run pip install 'memo-train[data]', or convert "
            'the file to lines of JSON such as {"text": "..."}'
        ) from None
