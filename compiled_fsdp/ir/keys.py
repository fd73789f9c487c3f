"""Names for values that a traced call cannot take: Dynamo passes on a string, and the traced code
looks the value up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

T = TypeVar("T", bound="Hashable")


class Keys(Generic[T]):
    """Values by key; equal values have one key, `prefix` and a number."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._keys: dict[T, str] = {}
        self._values: dict[str, T] = {}

    def key(self, value: T) -> str:
        """The key of this value, which is entered if it is new."""
        key = self._keys.setdefault(value, f"{self.prefix}{len(self._keys)}")
        self._values.setdefault(key, value)
        return key

    def __getitem__(self, key: str) -> T:
        """The value of a key that `key` has returned."""
        return self._values[key]
