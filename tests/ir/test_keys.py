"""`Keys`: equal values have one key, or the very same; a key brings its value back."""

import hashlib

import pytest

from compiled_fsdp.ir.keys import Keys


def test_equal_values_have_one_key():
    keys: Keys[tuple[int, ...]] = Keys("view")
    assert [keys.key(value) for value in ((1, 2), (3,), (1, 2))] == ["view0", "view1", "view0"]
    assert keys["view1"] == (3,)
    with pytest.raises(KeyError):
        keys["view2"]


def test_by_identity():
    """What users bring may compare as it likes, or have no hash at all."""

    class Hook(list):  # type: ignore[type-arg]
        pass

    keys: Keys[Hook] = Keys(lambda hook, n: f"{type(hook).__name__}#{n}", by_identity=True)
    first, second = Hook(), Hook()
    assert first == second
    assert [keys.key(hook) for hook in (first, second, first)] == ["Hook#0", "Hook#1", "Hook#0"]
    assert keys["Hook#1"] is second


def test_by_digest():
    keys: Keys[str] = Keys(lambda text, _: hashlib.sha256(text.encode()).hexdigest())
    digest = keys.key("a text")
    assert digest == hashlib.sha256(b"a text").hexdigest()
    assert keys.get(digest, "") == "a text"
    assert keys.get("another", "") == ""
