"""A stand-in for what a graph held in the process that wrote it down: only its text is known."""

from __future__ import annotations


class Opaque:
    """An op that is not looked up, or an argument of a kind that JSON has no form for: its text is
    all that is known.
    """

    _known: dict[str, Opaque] = {}  # noqa: RUF012  # one object a name, so that they compare

    def __init__(self, name: str) -> None:
        self.__name__ = name

    @classmethod
    def named(cls, name: str) -> Opaque:
        """The one of this name."""
        return cls._known.setdefault(name, cls(name))

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Never: such a graph is for reading."""
        raise TypeError(f"{self.__name__}: a graph that was built from JSON cannot be run")

    def __repr__(self) -> str:
        return self.__name__
