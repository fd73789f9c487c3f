"""The `fsdp::` ops by themselves, on one real rank (gloo in this process): results, fake kernels,
schemas, gradients.
"""

from __future__ import annotations

import unittest
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from kit.passes_harness import unit
from torch._subclasses import FakeTensorMode

from compiled_fsdp.ir import schema
from compiled_fsdp.ir.schema import (
    FREE,
    KEEP_SLICE,
    MARK_GRADS,
    REDUCE_GRAD,
    UNSHARD,
    UNSHARD_SLICE,
)
from compiled_fsdp.wire.kernels import set_owner

if TYPE_CHECKING:
    from torch import Tensor

    from compiled_fsdp.ir.spec import ParamSpec


# Running the ops as they are is the point here.
pytestmark = pytest.mark.filterwarnings(
    "ignore:compiled_fsdp. a graph reached its backend without our passes"
)


def same_kind(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())


class TestOps(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD.group_name
        a, b = unit("u", {"a": (3, 2), "b": (4,)}, world=1, group=group, post_group=group)
        half = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        cls.specs: list[ParamSpec] = [a, b, replace(a, **half), replace(b, **half)]

    @classmethod
    def tearDownClass(cls):
        dist.destroy_process_group()

    def setUp(self):
        torch.manual_seed(0)
        self.flat = torch.randn(10)
        self.marked: list[int] = []
        self.owner = MagicMock(mark=self.marked.extend)
        set_owner(self.flat, self.owner)

    def cases(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Every functional op with every spec."""
        found = []
        for spec in self.specs:
            full = torch.randn(spec.shape, dtype=spec.dtype)
            kept = torch.randn(spec.shard_numel, dtype=spec.dtype)
            found.append((UNSHARD, (self.flat, *spec.args())))
            found.append((REDUCE_GRAD, (full, self.flat, *spec.args())))
            found.append((KEEP_SLICE, (full, *spec.args())))
            found.append((UNSHARD_SLICE, (kept, *spec.args())))
        return found

    def test_opcheck(self):
        """Schemas (nothing aliased or mutated unsaid) and fake kernels against real ones."""
        for op, args in self.cases():
            if (
                op is not REDUCE_GRAD
            ):  # opcheck copies its inputs, and `reduce_grad` knows its unit by the flat buffer
                torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))

    def test_opcheck_autograd(self):
        args = (self.flat.requires_grad_(), *self.specs[0].args())
        torch.library.opcheck(
            UNSHARD, args, test_utils=("test_schema", "test_autograd_registration")
        )

    def test_fake_kernels(self):
        """Shape, dtype, device and strides of the fake result are those of the real one."""
        for op, args in self.cases():
            real = op(*args)
            with FakeTensorMode() as mode:
                fake = op(
                    *(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args)
                )
            self.assertTrue(same_kind(real, fake), (op, real, fake))

    def test_results_are_not_views(self):
        for op, args in self.cases():
            storage = op(*args).untyped_storage().data_ptr()
            self.assertNotIn(
                storage,
                [a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)],
            )

    def test_values(self):
        a, b = self.specs[:2]
        self.assertTrue(torch.equal(UNSHARD(self.flat, *a.args()), self.flat[:6].view(3, 2)))
        self.assertTrue(torch.equal(UNSHARD(self.flat, *b.args()), self.flat[6:]))
        expected = torch.tensor([0.0] * 6 + [1.0] * 4)
        self.assertTrue(torch.equal(REDUCE_GRAD(torch.ones(4), self.flat, *b.args()), expected))
        self.assertEqual(self.marked, [b.offset])

    def test_slice_round_trip(self):
        for spec in self.specs:
            full = torch.randn(spec.shape, dtype=spec.dtype)
            self.assertTrue(
                torch.equal(UNSHARD_SLICE(KEEP_SLICE(full, *spec.args()), *spec.args()), full)
            )

    def test_gradient(self):
        """Of a parameter read twice, in the dtype of the flat buffer, zero elsewhere."""
        b = self.specs[3]
        flat = self.flat.requires_grad_()
        (UNSHARD(flat, *b.args()).sum() + UNSHARD(flat, *b.args()).sum()).backward()
        self.assertTrue(torch.equal(flat.grad, torch.tensor([0.0] * 6 + [2.0] * 4)))

    def test_mark_without_a_unit(self):
        with self.assertRaisesRegex(
            RuntimeError, r"no unit owns the flat buffer of shape \(4,\).*not a copy or a part"
        ):
            MARK_GRADS(torch.ones(4), torch.ones(4), [0])

    def test_free(self):
        """The op itself keeps nothing and destroys nothing: the graph drops its reference with the
        call.
        """
        buffer = torch.ones(8)
        gone = weakref.ref(buffer)
        self.assertIsNone(FREE(buffer))
        self.assertEqual(buffer.sum(), 8)
        del buffer
        self.assertIsNone(gone())


def test_no_cuda_graph_replays_what_the_host_has_to_do() -> None:
    """Ops that call the unit, the user or the store are tagged; those that only compute or
    communicate are not.
    """
    ops = [op for op in vars(schema).values() if isinstance(op, torch._ops.OpOverload)]
    tagged = {op._opname for op in ops if torch.Tag.cudagraph_unsafe in op.tags}
    users = {"all_reduce_hook", "custom_all_gather", "custom_reduce_scatter"}
    units = {
        "reduce_grad",
        "mark_grads_",
        "retain_",
        "add_retained_",
        "reduce_later_",
        "step_",
        "update_",
        "momentum_",
        "orthogonalize",
        "update_matrices_",
        "shard_norms",
        "gather_ahead",
        "gather_next",
        "compare_",
        "verdict_",
        "note_counts_",
    }
    copies = {"copy_to", "start_copy", "offload", "reload", "fetch_state", "store_state"}
    assert tagged == users | units | copies | {"agree", "watch_heads"}
