"""Equal values have one key, or the very same; a key brings its value back."""

import hashlib
from typing import Any

import pytest

from compiled_fsdp.ir.keys import Brought, Keys


def test_equal_values_have_one_key():
    keys: Keys[tuple[int, ...]] = Keys("view")
    assert [keys.key(value) for value in ((1, 2), (3,), (1, 2))] == ["view0", "view1", "view0"]
    assert keys["view1"] == (3,)
    with pytest.raises(KeyError):
        keys["view2"]


def test_what_users_brought_goes_with_its_users():
    """It may compare as it likes, or have no hash at all."""

    class Hook(list):  # type: ignore[type-arg]
        pass

    brought, one, other = Brought(), list[Any](), list[Any]()
    first, second = Hook(), Hook()
    assert first == second
    keys = [brought.key(hook, one) for hook in (first, second, first)]
    assert keys == ["Hook#0", "Hook#1", "Hook#0"]
    assert len(one) == 2
    assert brought["Hook#1"] is second
    assert brought.key(first, other) == "Hook#0"
    del first, second
    one.clear()
    assert brought.get("Hook#0") is other[0]
    assert brought.get("Hook#1") is None
    other.clear()
    assert brought.get("Hook#0") is None
    assert brought.key(Hook(), one) == "Hook#2"


def test_what_has_no_weak_reference_stays():
    class Slim:
        __slots__ = ()

    brought, kept = Brought(), list[Any]()
    key = brought.key(Slim(), kept)
    kept.clear()
    assert isinstance(brought[key], Slim)


def test_by_digest():
    keys: Keys[str] = Keys(lambda text, _: hashlib.sha256(text.encode()).hexdigest())
    digest = keys.key("a text")
    assert digest == hashlib.sha256(b"a text").hexdigest()
    assert keys.get(digest, "") == "a text"
    assert keys.get("another", "") == ""
