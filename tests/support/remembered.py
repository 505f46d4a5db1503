"""Pure functions that several tests ask the same."""

from collections.abc import Callable
from typing import Any


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `function` once for arguments that are told alike, which dataclasses are where all their fields are."""
    results: dict[str, Any] = {}

    def call(*args: Any, **options: Any) -> Any:
        told = repr((args, options))
        if told not in results:
            results[told] = function(*args, **options)
        return results[told]

    return call
