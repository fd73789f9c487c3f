"""The table of traits: a row for every op that is registered, which says each trait, and agrees
with the schema; facts about ops are written nowhere else.
"""

from __future__ import annotations

import ast
from dataclasses import fields

import pytest
import torch
from kit.passes_harness import Hand, unit
from kit.rooms import files, tree

import compiled_fsdp
from compiled_fsdp.ir import schema
from compiled_fsdp.ir.collectives import STARTS
from compiled_fsdp.ir.graph import aliases, starts
from compiled_fsdp.ir.schema import OURS, TORCHS, TRAITS, Traits, param_spec, traits_of
from compiled_fsdp.planning.costs import Link
from compiled_fsdp.verification.expressions import has_effect

assert compiled_fsdp.__version__  # registers the ops

REGISTERED = sorted(schema.library._op_defs)  # torch has a few of its own in the namespace
CONSTANTS = {
    name
    for name, value in vars(schema).items()
    if isinstance(value, torch._ops.OpOverload) and value in TRAITS
}


def by_name(name: str) -> tuple[torch._ops.OpOverload, Traits]:
    op = getattr(torch.ops.fsdp, name.removeprefix("fsdp::")).default
    return op, traits_of(op)


def test_every_op_has_a_row_and_every_row_an_op():
    assert [f"fsdp::{name}" for name in sorted(OURS)] == REGISTERED
    assert len(TRAITS) == len(OURS) + len(TORCHS) == 48


@pytest.mark.parametrize("row", [*OURS.values(), *TORCHS.values()])
def test_a_row_says_each_trait(row: str):
    words = row.split()
    assert len(words) + 1 == len(fields(Traits))  # the last word says two
    spec_at, lowers_to, starts, price, awaits, *flags, effect, marks, is_on_host = words
    assert int(spec_at) >= 0
    assert lowers_to in ("-", "gather", "reduce")
    assert starts in ("-", "gather", "reduce_scatter", "all_to_all", "all_reduce", "copy")
    assert price in ("none", "kernel", "copy", *(field.name for field in fields(Link)))
    assert awaits in ("-", "graph", "unit")
    assert effect in ("-", "program", "notes")
    assert {*flags, marks} <= {"yes", "no"}
    assert is_on_host in ("yes", "each", "no")


@pytest.mark.parametrize("name", REGISTERED)
def test_a_row_agrees_with_the_schema(name: str):
    op, traits = by_name(name)
    arguments = [argument.name for argument in op._schema.arguments]
    assert bool(traits.spec_at) == ("spec" in arguments)
    if traits.spec_at:
        assert arguments[traits.spec_at :] == ["spec"]
    if traits.marks:
        assert arguments[2] == "offsets"
    assert not traits.is_alias, "an op of ours may not return its input"
    assert (torch.Tag.cudagraph_unsafe in op.tags) == traits.is_on_host
    if op._schema.is_mutable or not op._schema.returns:
        assert traits.effect, "it returns nothing: nobody would keep it"
    assert has_effect(op) == (traits.effect == "program" or traits.is_collective) or (
        traits.effect == "notes" and op._schema.is_mutable
    )
    assert (traits.price in ("none", "kernel", "copy")) == (not traits.is_collective)


@pytest.mark.parametrize("name", REGISTERED)
def test_an_op_has_kernels_and_a_meaning_in_words(name: str):
    for key in ("CompositeExplicitAutograd", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), f"{name}: {key}"
    assert f"`{name.removeprefix('fsdp::')}(" in (schema.__doc__ or "")


def test_starts_and_aliases_are_read_from_it():
    assert {*STARTS} == {op for op, traits in TRAITS.items() if traits.is_collective}
    hand = Hand()
    start = hand(schema.ALL_GATHER, hand.input("x", 4), [4], 2, "g")
    wait = hand(schema.c10d.wait_tensor.default, start)
    assert aliases(start) == [start, wait]
    assert starts(hand.graph) == [start]


def test_the_parameter_of_a_node():
    (spec,) = unit("u", {"w": (4, 2)})
    hand = Hand()
    flat = hand.input("flat", 4)
    full = hand.unshard(flat, spec)
    assert param_spec(full) == spec
    assert param_spec(hand.reduce_grad(full, flat, spec)) == spec
    with pytest.raises(ValueError, match=r"%neg_default .* has no ParamSpec among its arguments"):
        param_spec(hand.compute(full))


def test_facts_about_ops_stand_in_the_table_alone():
    """No other file has a tuple, a list or a set of ops of ours."""
    found = []
    for path in (p for p in files() if p.name not in ("schema.py", "collectives.py")):
        for node in ast.walk(tree(path)):
            members = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else []
            names = [ast.unparse(member).rpartition(".")[2] for member in members]
            if len(CONSTANTS & {*names}) > 1:
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
