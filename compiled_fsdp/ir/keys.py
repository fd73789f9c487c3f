"""Values by the text that stands for them where they cannot go themselves: in the arguments of an
op, in a traced call (Dynamo passes a string on,
and the traced code looks the value up), in a store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Keys(Generic[T]):
    """Values by key. Equal values have one key; with `by_identity`, the very same have.

    name: what a new value is called, given it and how many there are already; a text is put before
        that number.
    """

    def __init__(self, name: str | Callable[[T, int], str], *, by_identity: bool = False) -> None:
        self._name = name
        self._by_identity = by_identity
        self._keys: dict[object, str] = {}
        self._values: dict[str, T] = {}  # alive, so that no identity is used twice

    def key(self, value: T) -> str:
        """The key of this value, which is entered if it is new."""
        known = id(value) if self._by_identity else value
        key = self._keys.get(known)
        if key is None:
            number = len(self._keys)
            key = (
                f"{self._name}{number}"
                if isinstance(self._name, str)
                else self._name(value, number)
            )
            self._values[key] = value
            self._keys[known] = key
        return key

    def __getitem__(self, key: str) -> T:
        """The value of a key that `key` has returned."""
        return self._values[key]

    def get(self, key: str, default: T) -> T:
        """The value of a key, if it is one."""
        return self._values.get(key, default)
