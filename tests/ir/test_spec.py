"""`ParamSpec`: the arguments of the ops as a record, and the arithmetic of cutting rows."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from expecttest import TestCase
from kit.passes_harness import unit

from compiled_fsdp.ir.collectives import OPTIONS, gather_options, reduce_options
from compiled_fsdp.ir.schema import KEEP_SLICE, REDUCE_GRAD, SPEC, UNSHARD, UNSHARD_SLICE
from compiled_fsdp.ir.spec import ParamSpec, Reduction
from compiled_fsdp.units.layout import flat_layout

(SAMPLE,) = unit("u", {"w": (5, 3)}, world=4, reshard="slice", post_size=2, post_group="post")


def test_options_are_those_that_specs_come_from() -> None:
    """What `lower`'s entry declares is what some spec is decided by, and nothing else."""
    specs = [
        SAMPLE,
        replace(SAMPLE, gather_algorithm="custom:1", reduce_algorithm="custom:2", hook="3"),
        replace(SAMPLE, sync="retain"),
        replace(SAMPLE, sync="scatter"),
        replace(SAMPLE, device="cuda"),
        replace(SAMPLE, gather_quantized=torch.int8, reduce_quantized=torch.int8),
    ]
    found = {o for spec in specs for o in (*gather_options(spec), *reduce_options(spec))}
    assert found == {*OPTIONS}


class TestSpec(TestCase):
    def test_schema_is_the_record(self):
        """The dataclass, the text of the schema, and the registered ops list the same names in the
        same order.
        """
        names = [f.name for f in fields(ParamSpec)]
        self.assertEqual([part.split()[-1] for part in SPEC.split(", ")], names)
        for op, num_tensors in (
            (UNSHARD, 1),
            (REDUCE_GRAD, 2),
            (KEEP_SLICE, 1),
            (UNSHARD_SLICE, 1),
        ):
            self.assertEqual([a.name for a in op._schema.arguments][num_tensors:], names)

    def test_round_trip(self):
        self.assertEqual(ParamSpec.of(SAMPLE.args()), SAMPLE)
        self.assertEqual(
            ParamSpec.of([list(a) if isinstance(a, tuple) else a for a in SAMPLE.args()]), SAMPLE
        )

    def test_wrong_number_of_arguments(self):
        self.assertExpectedRaisesInline(
            ValueError,
            lambda: ParamSpec.of((0, (4, 2))),
            """ParamSpec.of: got 2 arguments (0, (4, 2)); the schema of fsdp::unshard has 36 after the flat buffer: ['offset', 'shape', 'dim', 'dtype', 'group_size', 'group', 'gather_algorithm', 'reduce_group', 'reshard', 'post_size', 'post_group', 'reduce_dtype', 'reduce_op', 'reduce_algorithm', 'pre_divide', 'post_divide', 'replicate_size', 'replicate_group', 'sync', 'is_accumulating', 'hook', 'overlap', 'unit', 'fqn', 'reduces_in_flight', 'forward_after', 'backward_after', 'own_message', 'forward_ahead', 'backward_ahead', 'retained_dtype', 'device', 'pins', 'gather_quantized', 'reduce_quantized', 'is_checked']""",  # noqa: E501
        )

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
