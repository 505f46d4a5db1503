"""A mapping whose values are made when they are first asked for."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TypeVar

_Value = TypeVar("_Value")


class LazyMapping(Mapping[str, _Value]):
    """Makes each value once, when it is first asked for: a command needs one model or machine of many."""

    def __init__(self, makers: Mapping[str, Callable[[], _Value]]) -> None:
        self._makers = {name: cache(make) for name, make in makers.items()}

    def __getitem__(self, name: str) -> _Value:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
