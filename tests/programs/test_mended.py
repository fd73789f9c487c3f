"""What random programs found, as the smallest scripts: each kind equals the unsharded model,
or says what is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from kit.harness import IS_2_11
from programs.hunt import Hunter
from programs.source import Script, read

if TYPE_CHECKING:
    from kit.pool import Pool

RUN = "# run: world=2 dim=4 bucket=0 budget=None low_precision=False is_whole=False mesh=1d kinds="
MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
{members}
    def forward(self, x, ids):
{forward}
        return self.head(x)
model = Model()
{setup}
{optimizer}
for step in range(2):
    x, ids = batch(step)
{loop}
record(model)
"""
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
LOOP = """loss = model(x, ids).square().mean()
loss.backward()
record(model, loss)
optimizer.step()
optimizer.zero_grad()"""
KEEP = "model.set_reshard_after_backward(False)\nmodel = compiled(model)"
HOOK = "if x.requires_grad:\n    x.register_hook(lambda grad: grad * 0.5)\nx = self.a(x)"
ZERO = (
    "loss = model(x, ids).square().mean()\n{}\nloss.backward()\nrecord(model, loss)\n"
    "optimizer.step()"
)
GRAD = f"{LOOP}\nnote(*torch.autograd.grad(model(x, ids).mean(), x))"  # twice, of one input
LOW = "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
SCAN = """def step(state, row):
    return torch.tanh(self.a(state)), state + row
x = scan(step, torch.zeros_like(x[0]), x)[1]
"""
ENTRIES = "{k: v.clone() for k, v in model.state_dict().items()}"


@dataclass(frozen=True)
class Case:
    """A script by what differs, which kinds run, and what each verdict is, and says."""

    forward: str
    setup: str = "fully_shard(model)\nmodel = compiled(model)"
    members: str = ""
    loop: str = LOOP
    optimizer: str = SGD
    kinds: str = "compiled"
    word: str = "equal"
    says: str = ""
    low: bool = False

    def script(self) -> Script:
        """As the random ones."""
        parts = {
            "members": self.members.splitlines(),
            "forward": self.forward.splitlines(),
            "loop": self.loop.splitlines(),
        }
        wide = {"members": 8, "forward": 8, "loop": 4}
        text = {name: "\n".join(" " * wide[name] + p for p in part) for name, part in parts.items()}
        source = MODEL.format(setup=self.setup, optimizer=self.optimizer, **text)
        return replace(read(f"{RUN}{self.kinds}\n{source}"), low_precision=self.low)


TIED = Case(
    "x = x + self.embed(ids)",
    members="self.embed = nn.Embedding(8, 4)",
    loop=f"{LOOP}\nmodel.load_state_dict({ENTRIES})\nloss = model(x, ids).square().mean()",
    kinds="eager,compiled",
)
CASES = {
    # a state dict of a module that holds another unit's parameter,
    # which stays gathered, was freed memory
    "tied before": replace(
        TIED,
        setup="model.head.weight = model.embed.weight\nfully_shard(model.embed)\n"
        "fully_shard(model)\n" + KEEP,
    ),
    "tied after": replace(
        TIED,
        setup="fully_shard(model.embed)\nfully_shard(model)\n"
        "model.head.weight = model.embed.weight\n" + KEEP,
    ),
    # parameters that stay, in functions of operators: reduced inside, and twice
    "scan of what stays": Case(SCAN + "x = torch.tanh(self.a(x))", "fully_shard(model)\n" + KEEP),
    "cond of what stays": Case(
        "x = x + self.a(x)\n"
        "x = torch.cond(x.sum() > 0, lambda y: self.a(y) + self.b(y), lambda y: self.b(y), (x,))",
        "fully_shard(model.a, reshard_after_forward=False)\nfully_shard(model)\n" + KEEP,
    ),
    "map of what stays": Case(
        "x = map_rows(lambda row: torch.tanh(self.b(row)), x)", "fully_shard(model)\n" + KEEP
    ),
    "inference of what stays": Case(
        "with torch.inference_mode():\n    y = self.a(x)\nx = self.a(x) + y.clone()",
        "fully_shard(model)\n" + KEEP,
    ),
    # a graph that a graph calls: below autograd, leaves were not found
    "nested region": Case(
        "x = REGION(self.a, x)\nx = REGION(self.a, x)",
        "REGION = torch.compiler.nested_compile_region(lambda m, y: torch.tanh(m(y)))\n"
        "fully_shard(model)\nmodel = compiled(model)",
    ),
    # no row on rank 1, where torch would save what rank 0 computes again
    "a checkpoint without rows": Case(
        "chosen = (x[:, 0] > 0).nonzero().flatten()\n"
        "x = x.index_add(0, chosen, torch.tanh(self.a(x[chosen])))",
        "model.a = checkpoint_wrapper(model.a)\nfully_shard(model.a)\nfully_shard(model)\n"
        "model = compiled(model)",
    ),
    # Dynamo describes `.grad` of what it meets
    "gradients in flight": Case(
        "x = torch.tanh(self.a(x))",
        "fully_shard(model)\ndef train(x, ids):\n    loss = model(x, ids).square().mean()\n"
        "    loss.backward()\n"
        "    return loss\ntrain = compiled(train)",
        optimizer=f"{SGD}\noverlap_optimizer(model, optimizer)",
        loop="model(x, ids).mean().backward()\nloss = train(x, ids)\nrecord(model, loss)\n"
        "optimizer.step()\noptimizer.zero_grad()",
    ),
    # the read that all others become was inside of the transformation
    "a write, and jvp": Case(
        "x = sum(torch.func.jvp(lambda y: torch.tanh(self.a(y)), (x,), (torch.ones_like(x),)))\n"
        + SCAN
        + "torch._foreach_mul_([p.data for p in self.a.parameters()], 0.9)",
        optimizer=f"{SGD}\ntake = whole_step(model, optimizer, lambda model, x, ids: "
        "model(x, ids).square().mean(), keep_grads=True)",
        loop="x = x.detach()\nrecord(model, take(x, ids))",
        word="announced",
        says="a.weight and 1 more is written to",
    ),
    # `repr` of a module under vmap: its ints were symbols
    "ints of modules": Case(
        "x = torch.tanh(torch.vmap(self.a)(x))",
        "fully_shard(model)\nmodel = compiled(model, fullgraph=True, dynamic=True)",
    ),
    # tied between two calls, with either in the place of the other
    "a later unit's parameter in an earlier one": Case(
        "x = self.b(self.a(x))",
        "fully_shard(model.a)\nmodel.a.weight = model.b.weight\n"
        "fully_shard(model)\nmodel = compiled(model)",
        kinds="eager,compiled",
    ),
    "an earlier unit's parameter in a later one": Case(
        "x = self.b(self.a(x))",
        "fully_shard(model.a)\nmodel.b.weight = model.a.weight\n"
        "fully_shard(model)\nmodel = compiled(model)",
        kinds="eager,compiled",
    ),
    # a gathered copy is written to behind a graph break
    "a parameter that leaves a graph": Case(
        "x = self.a(x)\nhalve(self.a.weight)\nx = self.b(x)",
        "for unit in (model.a, model.b, model):\n    fully_shard(unit)\n"
        "@torch.compiler.disable\ndef halve(w):\n    w.data.mul_(0.5)\nmodel = compiled(model)",
        loop="loss = model(x, ids).square().mean()\nrecord(model, loss)\noptimizer.zero_grad()",
        word="announced",
        says="parameter a.weight is read in a graph that ends at a graph break",
    ),
    # outside of graphs, an input is another tensor in each call
    "a hook on an input, eager": Case(
        HOOK, loop=GRAD, kinds="eager", word="announced", says="registers a hook on its input"
    ),
    "a hook on an input": Case(HOOK, loop=GRAD),
    "a late wait in a compiled function": Case(
        "x = self.b(self.a(x))",
        "for unit in (model.a, model.b, model):\n    fully_shard(unit)\ndef train(x, ids):\n"
        "    handle = model.a.unshard(async_op=True)\n    y = model(x, ids)\n    handle.wait()\n"
        "    return y.square().mean()\ntrain = compiled(train)",
        loop=LOOP.replace("model(x, ids).square().mean()", "train(x, ids)"),
        kinds="eager,compiled",
    ),
    # in a graph what another unit holds is gathered, in param_dtype; outside it rests in fp32
    "a branch on another unit's dtype": Case(
        "x = torch.tanh(self.a(x))\nif self.a.weight.dtype == torch.float32:\n    x = x * 2",
        "for unit in (model.a, model):\n"
        f"    fully_shard(unit, mp_policy={LOW})\nmodel = compiled(model)",
        word="announced",
        says="a branch on the dtype may take the other side",
        low=True,
    ),
    "a branch on the dtype of what an evaluation has freed": Case(
        "x = torch.tanh(self.a(x))\nwith torch.no_grad():\n    self.a(x)\n"
        "if self.a.weight.dtype == torch.float32:\n    x = x * 2",
        "for unit in (model.a, model):\n"
        f"    fully_shard(unit, mp_policy={LOW}, reshard_after_forward=False)\n"
        "model = compiled(model)",
        word="announced",
        says="a branch on the dtype may take the other side",
        low=True,
    ),
    # between forward and backward the outermost module has full parameters,
    # and gradients are not theirs
    "zero_grad before backward": Case(
        "x = self.b(self.a(x))",
        "for unit in (model.a, model):\n    fully_shard(unit)\nmodel = compiled(model)",
        loop=ZERO.format("model.zero_grad(set_to_none=False)"),
        kinds="eager,compiled",
    ),
    "a module's zero_grad before backward": Case(
        "x = self.b(self.a(x))",
        "fully_shard(model)",
        loop=ZERO.format("for layer in (model.a, model.b, model.head):\n    layer.zero_grad()"),
        kinds="eager",
    ),
    "gradients dropped one by one before backward": Case(
        "x = self.b(self.a(x))",
        "fully_shard(model)",
        loop=ZERO.format("for p in model.parameters():\n    p.grad = None"),
        kinds="eager",
        word="announced",
        says="have gradients all the same, to which that backward adds",
    ),
    "a norm of gradients behind another forward": Case(
        "x = self.b(self.a(x))",
        "fully_shard(model)",
        loop=LOOP.replace(
            "record(model, loss)",
            "model(x, ids)\nnn.utils.clip_grad_norm_(model.parameters(), 0.01)\nnote(loss)",
        ),
        kinds="eager",
        word="announced",
        says="parameters() gives full parameters of Model, which a forward has left",
    ),
    "an optimizer that is built after a forward": Case(
        "x = self.b(self.a(x))",
        "fully_shard(model)\nmodel(*batch(0))",
        kinds="eager",
        word="refused",
        says="SGD.step: it holds full parameters of 'Model' (a.weight, a.bias, b.weight and 2 "
        "more)",
    ),
    # a unit that calls itself was freed by the inner call
    "a module that calls itself": Case(
        "if len(x) > 1:\n    y = torch.tanh(self.a(x))\n"
        "    return self.head(self.b(y)).sum() + self(y[:1], ids)\nx = self.b(self.a(x))",
        "fully_shard(model)\nmodel = compiled(model)",
        kinds="eager,compiled",
    ),
    # a backward inside of a backward freed the unit that the outer one comes back to
    "a gradient through a unit in a hook on its output": Case(
        "z = self.a(x)\ngiven = z.detach().requires_grad_()\nagain = self.a(given)\n"
        "z.register_hook(lambda g: g + "
        "torch.autograd.grad(again, given, g, retain_graph=True)[0])\n"
        "x = self.b(torch.tanh(z))",
        "for unit in (model.a, model.b, model):\n    fully_shard(unit)",
        kinds="eager",
    ),
    "reentrant checkpoints of a module in itself": Case(
        "y = torch.tanh(self.a(x))\nif len(x) > 1:\n    half = y[: len(x) // 2]\n"
        "    return self.head(self.b(y)) + checkpoint(self, half, ids, use_reentrant=True).sum(0)\n"
        "x = self.b(y)",
        "fully_shard(model)\nmodel = compiled(model)",
        loop=LOOP.replace("model(x, ids)", "checkpoint(model, x, ids, use_reentrant=True)"),
        kinds="eager,compiled",
    ),
    # a class without our properties: a trace found the sharded parameters
    "another class for a sharded layer": Case(
        "x = self.b(self.a(x))",
        "class Twice(nn.Linear):\n    def forward(self, x):\n"
        "        return super().forward(x) * 2\n"
        "fully_shard(model.b)\nfully_shard(model)\nmodel.a.__class__ = model.b.__class__ = Twice\n"
        "model = compiled(model)",
    ),
    # each rank trained by its own gradient;
    # and nothing is said of the other model, to which no backward comes
    "a layer in the place of a sharded one": Case(
        "x = self.b(self.a(x))",
        "fully_shard(model)\nmodel.head = nn.Linear(4, 8, bias=False)\nmodel = compiled(model)\n"
        "other = nn.Linear(4, 4)\nfully_shard(other)\n"
        "other(torch.ones(2, 4)).sum().backward()\nunused = other(torch.ones(2, 4))",
        kinds="eager,compiled",
        word="announced",
        says="SGD steps head.weight beside sharded parameters",
    ),
    "pruning of what is sharded": Case(
        "x = self.b(self.a(x))",
        "for unit in (model.a, model):\n    fully_shard(unit)\n"
        "import torch.nn.utils.prune\n"
        "torch.nn.utils.prune.identity(model.a, 'weight')\nmodel = compiled(model)",
        kinds="eager,compiled",
        word="refused",
        says="by pruning, or as a Parameter made of a sharded one",
    ),
    # loops that no generator draws, and that were right
    "two backwards, the second where the first leads": Case(
        "x = self.b(torch.tanh(self.a(x)))",
        loop=f"{LOOP.partition('record')[0]}"
        "moved = [(p, p.grad * 0.1) for p in model.parameters()]\n"
        "with torch.no_grad():\n    for p, by in moved:\n        p.add_(by)\n"
        "optimizer.zero_grad()\n"
        "loss = model(x, ids).square().mean()\nloss.backward()\nwith torch.no_grad():\n"
        "    for p, by in moved:\n        p.sub_(by)\nrecord(model, loss)\noptimizer.step()\n"
        "optimizer.zero_grad()",
        kinds="eager,compiled",
    ),
    "another model's copy between steps": Case(
        "x = self.b(torch.tanh(self.a(x)))",
        loop=f"{LOOP}\nslow = [p.detach().clone() for p in model.parameters()]\n"
        "for p, q in zip(model.parameters(), slow):\n"
        "    p.data.copy_(q.lerp_(p.data, 0.5).mul_(0.9))",
        kinds="eager,compiled",
    ),
    "a parametrized buffer of a unit": Case(
        "x = self.b(self.a(x) * self.a.mask)",
        "for unit in (model.a, model):\n    fully_shard(unit)\n"
        "nn.utils.parametrize.register_parametrization(model.a, 'mask', nn.Tanh())\n"
        "model = compiled(model)",
        "self.a.register_buffer('mask', torch.ones(4))",
        kinds="eager,compiled",
    ),
    "a second parametrization": Case(
        "x = self.b(self.a(x))",
        "for unit in (model.a, model):\n    fully_shard(unit)\n"
        "nn.utils.parametrize.register_parametrization(model.a, 'weight', nn.Tanh())\n"
        "model = compiled(model)",
        "nn.utils.parametrize.register_parametrization(self.a, 'weight', nn.Sigmoid())",
        kinds="eager,compiled",
    ),
    "a parameter of no elements": Case(
        "x = self.b(torch.tanh(self.a(x)) + self.none.sum())",
        "for unit in (model.a, model):\n    fully_shard(unit)\nmodel = compiled(model)",
        "self.none = nn.Parameter(torch.empty(0))",
        kinds="eager,compiled",
    ),
    "a graph that is kept, the first was not": Case(
        "x = self.b(torch.tanh(self.a(x)))",
        loop="loss = model(x, ids).square().mean()\nloss.backward(retain_graph=step == 1)\n"
        "if step == 1:\n    loss.backward()\nrecord(model, loss)\noptimizer.step()\n"
        "optimizer.zero_grad()",
    ),
    # errors that did not name what is wrong
    "a copy of a sharded layer": Case(
        "x = self.b(self.a(x)) + self.copied(x)",
        "import copy\nfully_shard(model)\nmodel.copied = copy.deepcopy(model.a)\n"
        "model = compiled(model)",
        kinds="eager,compiled",
        word="refused",
        says="copied.weight, copied.bias are DTensors under names that no unit has",
    ),
    "a parametrization of what is sharded": Case(
        "x = self.b(self.a(x))",
        "fully_shard(model)\nnn.utils.parametrizations.weight_norm(model.a)",
        kinds="eager",
        word="refused",
        says="a.parametrizations.weight.original0, a.parametrizations.weight.original1 are "
        "DTensors",
    ),
    "a parametrization of a unit": Case(
        "x = self.b(self.a(x))",
        "for unit in (model.a, model):\n    fully_shard(unit)\n"
        "nn.utils.parametrizations.weight_norm(model.a)\nmodel = compiled(model)",
        kinds="eager,compiled",
        word="refused",
        says="a.parametrizations.weight.original0, a.parametrizations.weight.original1 are "
        "DTensors",
    ),
    "uneven shards that are flattened": Case(
        "x = x + self.odd(x).sum() * nn.utils.parameters_to_vector(self.odd.parameters()).sum()",
        "for unit in (model.odd, model):\n    fully_shard(unit)",
        "self.odd = nn.Linear(4, 3)",
        kinds="eager",
        word="refused",
        says="sharded at that moment, as DTensor cannot (",  # and its words, which differ
    ),
    "mixed dtypes": Case(
        "self.count += 1\nx = self.a(x * self.count)",
        f"fully_shard(model, mp_policy={LOW})\nmodel = compiled(model)",
        "self.register_buffer('count', torch.zeros(1))",
        kinds="eager,compiled",
        word="refused",
        says="buffer count is torch.float32",
        low=True,
    ),
    "inputs that are not cast": Case(
        "x = self.a(x)",
        f"fully_shard(model, mp_policy={LOW[:-1]}, cast_forward_inputs=False))\n"
        "model = compiled(model)",
        kinds="eager,compiled",
        word="refused",
        says="inputs are not cast (cast_forward_inputs=False)",
        low=True,
    ),
    "a gradient beside the loss": Case(
        "x = torch.tanh(self.normed(x))",
        members="self.normed = nn.utils.weight_norm(nn.Linear(4, 4))",
        optimizer=f"{SGD}\n"
        "take = whole_step(model, optimizer, "
        "lambda model, x, ids: model(x, ids).square().mean())",
        loop="record(model, take(x.detach(), ids))",
        word="refused",
        says="[4, 4] of normed, made at ",
    ),
    "a parameter registered in a graph": Case(
        "self.b.weight = self.a.weight\nx = self.b(self.a(x))",
        "for unit in (model.a, model.b, model):\n    fully_shard(unit)\nmodel = compiled(model)",
        word="refused",
        says="Model: its compiled forward registers what is no parameter",
    ),
    "FlexAttention of what is sharded": Case(
        "with torch.no_grad():\n    bias = self.a.bias\n"
        "    y = flex_attention(*[x.detach()[None, None]] * 3, "
        "score_mod=lambda s, b, h, i, j: s + bias[j % 4])\n"
        "x = self.b(x) + y[0, 0]",
        "for unit in (model.a, model):\n    fully_shard(unit)",
        kinds="eager",
        word="refused",
        says="a parameter that is sharded at that moment, with a plain tensor: one of another "
        "unit (a)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_mended(two: Pool, name: str) -> None:
    case = CASES[name]
    if IS_2_11 and "scan(" in case.forward:
        pytest.skip('torch 2.11: scan "might be aliasing the input or the output", unsharded too')
    result = Hunter({2: two}).check(case.script())
    assert not result.invalid, result.invalid
    for verdict in result.verdicts:
        assert verdict.word == case.word, verdict
        assert case.says in verdict.detail
