"""Why Dynamo compiled again, in words where it was for something of ours."""

from __future__ import annotations

import re

SETTINGS = (
    "set_requires_gradient_sync, set_reshard_after_forward, set_gradient_divide_factor, a prefetch "
    "list, ..."
)
# What a guard looks at in the handle of a parameter, and what it means that it has changed.
OURS = {
    "is_plain": "parameter {name!r} was frozen, or is trained again (requires_grad), or its full "
    "form stays from one use to the next now, or does not any more",
    "is_frozen": "parameter {name!r} was frozen, or is trained again (requires_grad)",
    "is_resident": "the full parameter {name!r} stays from one use to the next now, or does not "
    "any more",
    "flat": "parameter {name!r} lies in another buffer: parameters of its unit were frozen or are "
    "trained again (requires_grad), or all were moved",
    "key": "what the unit of parameter {name!r} is set to do is another than when it was compiled "
    f"({SETTINGS})",
}
REPLACED = "a parameter of module {name!r} was replaced by another tensor, or put back"
TRAINING = (
    "module {name!r} was compiled in training mode and is called in evaluation mode, or the other "
    "way round (model.train(), model.eval())"
)
# Guards on a module of the user's: by the end of their path.
ON_MODULE = {
    **{
        re.compile(rf"(?P<path>\S+)\._fsdp_handles\['(?P<param>\w+)'\]\.{field}\b"): text
        for field, text in OURS.items()
    },
    re.compile(r"(not )?(?P<path>\S+)\._parameters\.replaced\b(?P<param>)"): REPLACED,
    re.compile(r"(?P<path>\S+)\.training == (True|False)(?P<param>)"): TRAINING,
}
MODES = {
    "GLOBAL_STATE changed: grad_mode": "it was compiled with gradients and is called without, or "
    "the other way round (torch.no_grad, as in an evaluation)",
    "GLOBAL_STATE changed: autocast": "it was compiled under torch.autocast and is called without, "
    "or the other way round",
}


def in_words(reason: str) -> str:
    """A guard that failed, as one line: whose compilation it belongs to, and what has changed."""
    line = reason.strip().split("\n", 1)[0].strip()
    number, colon, guard = line.partition(": ")
    prefix = f"{number}: " if colon and re.fullmatch(r"\d+/\d+", number) else ""
    guard = guard if prefix else line
    mode = next((text for start, text in MODES.items() if guard.startswith(start)), None)
    return prefix + (mode or _of_module(guard) or guard)


def _of_module(guard: str) -> str:
    """What has changed of a module or of a parameter that it holds; "" if the guard is no such."""
    for pattern, meaning in ON_MODULE.items():
        if found := pattern.match(guard):
            name = ".".join(filter(None, [_name(found["path"]), found["param"]]))
            return meaning.format(name=name) if name else ""
    return ""


def _name(path: str) -> str:
    """The module at the end of a path of Dynamo's, without FSDP1's wrappers."""
    parts = re.findall(r"_modules(?:'\])?\['([^']+)'\]", path)
    return ".".join(part for part in parts if part != "_fsdp_wrapped_module")
