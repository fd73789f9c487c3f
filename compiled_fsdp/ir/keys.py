"""Values by the text that stands for them where they cannot go themselves: in the arguments of an
op, in a traced call (Dynamo passes a string on, and the traced code looks the value up), in a
store.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Keys(Generic[T]):
    """Values by key. Equal values have one key.

    name: what a new value is called, given it and how many there are already; a text is put before
        that number.
    """

    def __init__(self, name: str | Callable[[T, int], str]) -> None:
        self._name = name
        self._keys: dict[T, str] = {}
        self._values: dict[str, T] = {}

    def key(self, value: T) -> str:
        """The key of this value, which is entered if it is new."""
        key = self._keys.get(value)
        if key is None:
            number = len(self._keys)
            key = (
                f"{self._name}{number}"
                if isinstance(self._name, str)
                else self._name(value, number)
            )
            self._values[key] = value
            self._keys[value] = key
        return key

    def __getitem__(self, key: str) -> T:
        """The value of a key that `key` has returned."""
        return self._values[key]

    def get(self, key: str, default: T) -> T:
        """The value of a key, if it is one."""
        return self._values.get(key, default)


class Brought:
    """What users brought to be called, by key: the very same has one key. Whoever uses it keeps it,
    so that it goes with the last of them, and what it holds (a trainer, error feedback as large as
    the model) with it.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._keys: dict[int, str] = {}
        self._values: dict[str, Callable[[], Any]] = {}

    def key(self, value: Any, kept_by: list[Any]) -> str:
        """The key of this value, which is entered if it is new, and kept in a list of its user's.

        An object that can have no weak reference is kept here, too.
        """
        if not any(kept is value for kept in kept_by):
            kept_by.append(value)
        if id(value) not in self._keys:
            key = f"{type(value).__name__}#{next(self._numbers)}"
            try:
                self._values[key] = weakref.ref(value)
                weakref.finalize(value, self._forget, id(value), key).atexit = False
            except TypeError:
                self._values[key] = lambda: value
            self._keys[id(value)] = key
        return self._keys[id(value)]

    def _forget(self, identity: int, key: str) -> None:
        del self._keys[identity], self._values[key]

    def __getitem__(self, key: str) -> Any:
        """The value of a key that `key` has returned, while somebody keeps it."""
        return self._values[key]()

    def get(self, key: str) -> Any:
        """The value of a key; None if it is none."""
        return self._values[key]() if key in self._values else None
