"""A cache for pure functions that several tests call with the same arguments."""

from collections.abc import Callable
from typing import Any


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call `function` once for all arguments with the same `repr`; equal dataclasses have the same `repr`."""
    results: dict[str, Any] = {}

    def call(*args: Any, **options: Any) -> Any:
        told = repr((args, options))
        if told not in results:
            results[told] = function(*args, **options)
        return results[told]

    return call
