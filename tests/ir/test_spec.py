"""`ParamSpec`: the arguments of the ops as a record, and the arithmetic of cutting rows."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from expecttest import TestCase
from kit.passes_harness import unit

from compiled_fsdp.ir.collectives import CUSTOM, OPTIONS, gather_options, reduce_options
from compiled_fsdp.ir.schema import (
    KEEP_SLICE,
    REDUCE_GRAD,
    REDUCE_LATER,
    UNSHARD,
    UNSHARD_SLICE,
)
from compiled_fsdp.ir.spec import REGISTRY, ParamSpec, Reduction, _known
from compiled_fsdp.units.layout import flat_layout
from compiled_fsdp.wire.symmetric import ALL_GATHER

(SAMPLE,) = unit("u", {"w": (5, 3)}, world=4, reshard="slice", post_size=2, post_group="post")

SYMMETRIC = CUSTOM + REGISTRY.key(ALL_GATHER, [])


def test_options_are_those_that_specs_come_from() -> None:
    """What `lower`'s entry declares is what some spec is decided by, and nothing else."""
    specs = [
        SAMPLE,
        replace(SAMPLE, gather_algorithm="custom:1", reduce_algorithm="custom:2", hook="3"),
        replace(SAMPLE, gather_algorithm=SYMMETRIC),
        replace(SAMPLE, sync="retain"),
        replace(SAMPLE, sync="scatter"),
        replace(SAMPLE, device="cuda"),
        replace(SAMPLE, gather_quantized=torch.int8, reduce_quantized=torch.int8),
    ]
    found = {o for spec in specs for o in (*gather_options(spec), *reduce_options(spec))}
    assert found == {*OPTIONS}


class TestSpec(TestCase):
    def test_ops_have_one_argument_of_it(self):
        """Behind their tensors: what a compiler does for each argument of
        each node, it does once.
        """
        for op, num_tensors in (
            (UNSHARD, 1),
            (REDUCE_GRAD, 2),
            (KEEP_SLICE, 1),
            (UNSHARD_SLICE, 1),
            (REDUCE_LATER, 4),
        ):
            self.assertEqual([a.name for a in op._schema.arguments][num_tensors:], ["spec"])

    def test_round_trip(self):
        for spec in (
            SAMPLE,
            replace(SAMPLE, unit="it's", fqn='a "name"', forward_after=("", "0"), pins=True),
            replace(SAMPLE, forward_ahead=math.inf, backward_ahead=-math.inf, pre_divide=1 / 3),
            replace(SAMPLE, gather_quantized=torch.float8_e4m3fn, retained_dtype=torch.float32),
        ):
            (text,) = spec.args()
            self.assertIs(ParamSpec.of(spec.args()), ParamSpec.of([text]))
            _known.pop(text)  # as another process reads it
            read = ParamSpec.of([text])
            self.assertEqual(read, spec)
            self.assertEqual(read.args(), (text,))
            self.assertEqual(ParamSpec.of_values(spec.values()), spec)
            self.assertEqual(
                ParamSpec.of_values(
                    [list(v) if isinstance(v, tuple) else v for v in spec.values()]
                ),
                spec,
            )

    def test_other_arguments(self):
        self.assertExpectedRaisesInline(
            ValueError,
            lambda: ParamSpec.of((0, (4, 2))),
            """ParamSpec.of: got (0, (4, 2)); should be one argument, a ParamSpec as text (ParamSpec.args())""",  # noqa: E501
        )
        for text, why in (
            ("ParamSpec(offset=0)", "missing"),
            ("print(1)", "no ParamSpec"),
            ("ParamSpec(dtype=torch.nn)", "torch.nn is no dtype"),
            ("ParamSpec(offset=open('x'))", "malformed"),
            ("ParamSpec(", "never closed"),
        ):
            with self.assertRaisesRegex(ValueError, f"should be a ParamSpec as text.*{why}"):
                ParamSpec.of((text,))

    def test_wrong_number_of_values(self):
        with self.assertRaisesRegex(
            ValueError, r"got 2 values \(0, \(4, 2\)\); a ParamSpec has 41: \['offset', 'shape', "
        ):
            ParamSpec.of_values((0, (4, 2)))

    def test_rows_are_cut_as_torch_chunk_cuts(self):
        for rows in range(1, 20):
            full = torch.arange(rows * 2).view(rows, 2)
            for world in range(1, 12):
                spec = replace(SAMPLE, shape=(rows, 2), group_size=world)
                (shard,) = flat_layout([full.shape], world).shards
                chunks = [*full.chunk(world), *[full[:0]] * world][:world]
                self.assertEqual(spec.rows, chunks[0].shape[0])
                self.assertEqual(
                    [shard.local_rows(rank) for rank in range(world)], [c.shape[0] for c in chunks]
                )
                self.assertEqual(spec.shard_numel, shard.numel)
                padded = torch.nn.functional.pad(full, (0, 0, 0, spec.padded_shape[0] - rows))
                self.assertEqual(padded.shape, spec.padded_shape)
                for mine, chunk in zip(padded.view(world, -1), chunks, strict=True):
                    self.assertTrue(torch.equal(mine[: chunk.numel()].view_as(chunk), chunk))
                    self.assertFalse(mine[chunk.numel() :].any())

    def test_over_post_group(self):
        small = SAMPLE.over_post_group()
        self.assertEqual((small.group_size, small.group, small.offset), (2, "post", 0))
        self.assertEqual((SAMPLE.rows, small.rows), (2, 3))
        self.assertEqual(replace(SAMPLE, device="cuda").over_post_group().device, "")

    def test_reduction(self):
        spec = replace(
            SAMPLE,
            reduce_dtype=torch.float16,
            pre_divide=2.0,
            replicate_size=3,
            replicate_group="r",
        )
        self.assertEqual(
            spec.reduction, Reduction(torch.float16, "sum", "reduce_scatter", 2.0, 4.0, 3, "r")
        )
