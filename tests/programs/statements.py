"""What random programs are made of: statements of a forward, of the set-up around sharding, and of a training loop.

`{m}` is a linear layer (`self.up` in a block, `self.a` in the model), `{l}` the layer without `self.`, `{d}` the width.
A forward statement turns `x` [rows, d] into `x`; in every program `ids` [rows] and `step` have their meaning from `render`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Statement:
    """Lines of source, and what they need.

    init: lines for `__init__`. at: the place in the training loop (see `program.render`). breaks: Dynamo cannot trace it, so
    no full graph is asked for. inexact: sums are taken in another order than unsharded.
    """

    lines: str
    init: str = ""
    at: str = "forward"
    breaks: bool = False
    inexact: bool = False
    for_block: bool = False
    needs: str = ""


FORWARD: dict[str, Statement] = {
    "call": Statement("x = torch.tanh({m}(x))", for_block=True),
    "read": Statement("x = x + {m}.weight.sum(0)"),
    "linear": Statement("x = torch.tanh(F.linear(x, {m}.weight, {m}.bias))"),
    "slice": Statement("x = x + {m}.weight[1:].mean(0) * {m}.bias"),
    "alias": Statement("w = {m}.weight\nwith torch.no_grad():\n    {m}.weight.mul_(0.9)\nx = torch.tanh(F.linear(x, w))"),
    "getattr": Statement("x = x + getattr({m}, 'weight').sum(0) + {m}._parameters['bias']"),
    "detach": Statement("x = x + {m}.weight.detach().mean(0)"),
    # substitutions
    "substitute": Statement("w = torch.tanh(x.T @ x)\nx = torch.tanh(torch.func.functional_call({m}, {{'weight': w}}, (x,)))"),
    "substitute_own": Statement(
        "w = {{'weight': {m}.weight * 0.5}}\nx = torch.tanh(torch.func.functional_call({m}, w, (x,)))"
    ),
    "substitute_buffer": Statement(
        "x = torch.tanh(torch.func.functional_call({m}, {{'weight': self.generated}}, (x,)))",
        init="self.register_buffer('generated', torch.eye({d}))",
    ),
    # writes
    "clamp_": Statement("with torch.no_grad():\n    {m}.weight.clamp_(-0.2, 0.2)"),
    "data_clamp_": Statement("{m}.weight.data.clamp_(-0.2, 0.2)"),
    "copy_": Statement("with torch.no_grad():\n    {m}.weight.copy_({m}.weight.clamp(-0.2, 0.2))"),
    "data_copy_": Statement("{m}.weight.data.copy_({m}.weight.data * 0.9)"),
    "data_assign": Statement("{m}.weight.data = {m}.weight.data * 0.9"),
    "detach_mul_": Statement("{m}.weight.detach().mul_(0.9)"),
    "index_write": Statement("with torch.no_grad():\n    {m}.weight[0] = 0.1"),
    "foreach_mul_": Statement("with torch.no_grad():\n    torch._foreach_mul_([{m}.weight, {m}.bias], 0.9)"),
    "foreach_data": Statement("torch._foreach_mul_([p.data for p in {m}.parameters()], 0.9)"),
    "normalize": Statement("with torch.no_grad():\n    {m}.weight.div_({m}.weight.norm(dim=1, keepdim=True))"),
    "embed": Statement("x = x + self.embed(ids)", init="self.embed = nn.Embedding(8, {d})"),
    "embed_max_norm": Statement("x = x + self.embed(ids)", init="self.embed = nn.Embedding(8, {d}, max_norm=0.5)"),
    "embed_twice": Statement("x = x + self.embed(ids) * self.embed.weight.sum(0)", init="self.embed = nn.Embedding(8, {d}, max_norm=0.5)"),
    # momentum encoders
    "momentum": Statement(
        "with torch.no_grad():\n    for p, q in zip(self.slow.parameters(), {m}.parameters()):\n        p.lerp_(q, 0.1)\nx = x + self.slow(x)",
        init="self.slow = nn.Linear({d}, {d}).requires_grad_(False)",
    ),
    "momentum_data": Statement(
        "for p, q in zip(self.slow.parameters(), {m}.parameters()):\n    p.data = p.data * 0.9 + q.data * 0.1\nx = x + self.slow(x)",
        init="self.slow = nn.Linear({d}, {d}).requires_grad_(False)",
    ),
    "momentum_data_mul_": Statement(
        "for p, q in zip(self.slow.parameters(), {m}.parameters()):\n    p.data.mul_(0.9).add_(q.data, alpha=0.1)\nx = x + self.slow(x)",
        init="self.slow = nn.Linear({d}, {d}).requires_grad_(False)",
    ),
    "momentum_foreach": Statement(
        "with torch.no_grad():\n    torch._foreach_lerp_(list(self.slow.parameters()), list({m}.parameters()), 0.1)\nx = x + self.slow(x)",
        init="self.slow = nn.Linear({d}, {d}).requires_grad_(False)",
    ),
    # iterations
    "norm_of_all": Statement("x = x * sum(p.square().sum() for p in self.parameters())"),
    "norm_of_layer": Statement("x = x * sum(p.square().sum() for p in {m}.parameters())"),
    "named": Statement("x = x + sum(p.sum() for name, p in {m}.named_parameters() if name.endswith('weight'))"),
    "dtype": Statement("if next(self.parameters()).dtype == torch.float32:\n    x = x * 2"),
    "dtype_of_layer": Statement("if {m}.weight.dtype == torch.float32:\n    x = x * 2"),
    "finfo": Statement("x = x.clamp(min=torch.finfo(next(self.parameters()).dtype).min / 2)"),
    "numel": Statement("x = x * (sum(p.numel() for p in self.parameters()) / 100)"),
    "state_dict": Statement("x = x + {m}.state_dict()['weight'].sum()", breaks=True),
    # buffers
    "buffer": Statement(
        "self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)\nx = x - self.mean",
        init="self.register_buffer('mean', torch.zeros({d}))",
    ),
    "buffer_assign": Statement(
        "self.mean = self.mean * 0.9 + x.detach().mean(0)\nx = x - self.mean", init="self.register_buffer('mean', torch.zeros({d}))"
    ),
    "counter": Statement("self.count += 1\nx = x * self.count", init="self.register_buffer('count', torch.zeros(1))"),
    "batch_norm": Statement("x = self.bn(x)", init="self.bn = nn.BatchNorm1d({d})"),
    # sub-calls
    "no_grad_call": Statement("with torch.no_grad():\n    y = {m}(x)\nx = x + y", for_block=True),
    "inference_call": Statement("with torch.inference_mode():\n    y = {m}(x)\nx = x + y.clone()", for_block=True, breaks=True),
    "no_grad_after": Statement("y = {m}(x)\nwith torch.no_grad():\n    z = {m}(y)\nx = torch.tanh(y) + z", for_block=True),
    "checkpoint": Statement("x = torch.tanh(checkpoint({m}, x, use_reentrant=False))", for_block=True),
    "checkpoint_reentrant": Statement("x = torch.tanh(checkpoint({m}, x, use_reentrant=True))", for_block=True, breaks=True),
    # collectives of the user
    "all_reduce": Statement("x = x + funcol.all_reduce(x.detach(), 'sum', dist.group.WORLD) * 0.1"),
    "dist_all_reduce": Statement("y = x.detach().clone()\ndist.all_reduce(y)\nx = x + y * 0.1"),
    "all_to_all": Statement(
        "y = funcol.all_to_all_single_autograd(x, None, None, dist.group.WORLD)\nx = x + funcol.wait_tensor(y) * 0.1"
    ),
    "all_to_all_twice": Statement(
        "y = torch.ops._c10d_functional.all_to_all_single(x.detach(), [len(x) // world] * world, [len(x) // world] * world, group_name)\n"
        "wait = torch.ops._c10d_functional.wait_tensor\nx = x + wait(y) + wait(y)"
    ),
    # graph breaks
    "break": Statement("torch._dynamo.graph_break()", breaks=True),
    "item": Statement("x = x * (1.0 if x.sum().item() > 1e9 else 0.5)", breaks=True),
    "disabled": Statement("x = disabled(x)", breaks=True),
    "disabled_call": Statement("x = torch._dynamo.disable({m})(x)", breaks=True, for_block=True),
    "experts": Statement(
        "chosen = (x[:, 0] > 0).nonzero().flatten()\nx = x.index_add(0, chosen, torch.tanh({m}(x[chosen])))", breaks=True, for_block=True
    ),
    "data_branch": Statement("if x.sum() > 1e9:\n    x = x * 2", breaks=True),
    # exceptions
    "raises": Statement("if self.fails:\n    raise ValueError('as asked')", init="self.fails = False"),
    "hook_raises": Statement("if self.fails:\n    x.register_hook(raise_error)", init="self.fails = False"),
    "try": Statement("try:\n    x = {m}(x)\n    raise ValueError('as asked')\nexcept ValueError:\n    x = torch.tanh(x)", for_block=True),
}

# Lines between building and the training loop. before: ahead of sharding; sharded: after it; ready: after the optimizer is built.
SETUP: dict[str, Statement] = {
    "tie_before": Statement("model.b.weight = model.a.weight", at="before", needs="ab"),
    "tie_after": Statement("model.b.weight = model.a.weight", at="sharded", needs="ab"),
    "tie_head_before": Statement("model.head.weight = model.embed.weight", at="before", needs="embed"),
    "tie_head_after": Statement("model.head.weight = model.embed.weight", at="sharded", needs="embed"),
    "share_after": Statement("model.b = model.a", at="sharded", needs="ab"),
    "to_float64": Statement("model.to(torch.float64)", at="sharded"),
    "load": Statement("model.load_state_dict({{k: v * 0.9 for k, v in model.state_dict().items()}})", at="sharded"),
    "load_assign": Statement("model.load_state_dict({{k: v * 0.9 for k, v in model.state_dict().items()}}, assign=True)", at="sharded"),
    "to_empty": Statement("model.to_empty(device='cpu')\nfor i, p in enumerate(model.parameters()):\n    nn.init.constant_(p, 0.1 + i / 50)", at="sharded", needs="meta"),
    "init": Statement("for i, p in enumerate(model.parameters()):\n    nn.init.constant_(p, 0.1 + i / 50)", at="sharded"),
    "freeze_a": Statement("model.a.requires_grad_(False)", at="sharded"),
    "keep": Statement("model.set_reshard_after_backward(False)", at="sharded"),
    "keep_forward": Statement("model.set_reshard_after_forward(False)", at="sharded"),
    "prefetch": Statement("model.set_modules_to_forward_prefetch([model.a])", at="sharded", needs="unit_a"),
    "overlap": Statement("overlap_optimizer(model, optimizer)", at="ready"),
    "overlap_in_backward": Statement("overlap_optimizer(model, optimizer, in_backward=True)", at="ready", needs="plain_loop"),
    "ema": Statement("ema = [p.detach().clone() for p in model.parameters()]", at="ready"),
    "eval_first": Statement("with torch.no_grad():\n    note(model(*batch(7)))", at="ready"),
    "warm_double": Statement("model(*batch(7)).sum()", at="ready"),
}

# start: before the forward. loss: after it. grads: after backward. end: after the step. The others replace the line of that name.
LOOP: dict[str, Statement] = {
    "input_grad": Statement("note(*torch.autograd.grad(loss, x, retain_graph=True))", at="loss"),
    "input_backward": Statement("loss.backward(inputs=[x], retain_graph=True)\nnote(x.grad)", at="loss"),
    "input_grad_after": Statement("note(*torch.autograd.grad(model(x, ids).mean(), x))", at="grads"),
    "twice": Statement("loss.backward(retain_graph=True)", at="loss", inexact=True),
    "two_losses": Statement("model(x, ids).mean().backward()", at="start", inexact=True),
    "two_forwards": Statement("loss = model(x, ids).square().mean() + model(x * 0.5, ids).mean()", at="forward", inexact=True),
    "accumulate": Statement(
        "model.set_requires_gradient_sync(False)\nmodel(x, ids).square().mean().backward()\nmodel.set_requires_gradient_sync(True)",
        at="start", inexact=True,
    ),
    "accumulate_input_grad": Statement(
        "model.set_requires_gradient_sync(False)\nmodel(x, ids).square().mean().backward()\n"
        "note(*torch.autograd.grad(model(x, ids).mean(), x))\nmodel.set_requires_gradient_sync(True)",
        at="start", inexact=True,
    ),
    "half_batch": Statement("x, ids = x[:2].detach().requires_grad_(), ids[:2]", at="start", needs="no_all_to_all"),
    "other_batch": Statement("x, ids = (t.detach().repeat(1 + step, *[1] * (t.dim() - 1)) for t in (x, ids))\nx.requires_grad_()", at="start"),
    "rank_batch": Statement("x, ids = (t.detach().repeat(1 + 3 * rank, *[1] * (t.dim() - 1)) for t in (x, ids))\nx.requires_grad_()", at="start", needs="no_all_to_all"),
    "one_row": Statement("x, ids = x[: 1 + rank].detach().requires_grad_(), ids[: 1 + rank]", at="start", needs="no_all_to_all"),
    "no_input_grad": Statement("x = x.detach()", at="start"),
    "freeze": Statement("model.a.requires_grad_(step % 2 == 0)", at="start"),
    "unfreeze": Statement("model.head.requires_grad_(step > 0)", at="start"),
    "deepcopy_state": Statement("saved = copy.deepcopy(model.state_dict())\nif step == 0:\n    model.load_state_dict(saved)", at="end"),
    "rollback": Statement("saved = copy.deepcopy(model.state_dict())", at="start"),
    "load_each": Statement("model.load_state_dict({{k: v.clone() for k, v in model.state_dict().items()}})", at="end"),
    "load_assign_each": Statement(
        "model.load_state_dict({{k: v.clone() for k, v in model.state_dict().items()}}, assign=True)\n{optimizer}", at="end"
    ),
    "eval": Statement("with torch.no_grad():\n    note(model(x, ids))", at="end"),
    "eval_mode": Statement("model.eval()\nwith torch.no_grad():\n    note(model(x, ids))\nmodel.train()", at="end"),
    "eval_before": Statement("with torch.no_grad():\n    note(model(x, ids))", at="start"),
    "eval_between": Statement("with torch.no_grad():\n    note(model(x, ids))", at="loss"),
    "inference": Statement("with torch.inference_mode():\n    note(model(x.detach(), ids))", at="end"),
    "unused_forward": Statement("model(x, ids)", at="start"),
    "decay": Statement("with torch.no_grad():\n    for p in model.parameters():\n        p.mul_(0.9)", at="end"),
    "decay_data": Statement("for p in model.parameters():\n    p.data.mul_(0.9)", at="end"),
    "decay_foreach": Statement("with torch.no_grad():\n    torch._foreach_mul_(list(model.parameters()), 0.9)", at="end"),
    "decay_before_backward": Statement("for p in model.head.parameters():\n    p.data.mul_(1.0)", at="loss"),
    "scale_grads": Statement("for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)", at="grads"),
    "clip": Statement("note(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))", at="grads", inexact=True),
    "caught": Statement(
        "model.fails = True\ntry:\n    model(x, ids)\nexcept ValueError:\n    pass\nmodel.fails = False", at="start", needs="raises"
    ),
    "caught_backward": Statement(
        "model.fails = True\ntry:\n    model(x, ids).sum().backward()\nexcept (ValueError, RuntimeError):\n    pass\n"
        "model.fails = False\noptimizer.zero_grad()", at="start", needs="hook_raises",
    ),
    "unshard": Statement("model.a.unshard()", at="start", needs="unit_a"),
    "unshard_async": Statement("handle = model.a.unshard(async_op=True)\nhandle.wait()", at="start", needs="unit_a"),
    "wait_late": Statement("handle = model.a.unshard(async_op=True)\nmodel(x, ids)\nhandle.wait()", at="start", needs="unit_a"),
    "wait_after_forward": Statement(
        "handle = model.a.unshard(async_op=True)\nloss = model(x, ids).square().mean()\nhandle.wait()", at="forward", needs="unit_a"
    ),
    "reshard": Statement("model.a.reshard()", at="end", needs="unit_a"),
    "update_ema": Statement(
        "torch._foreach_lerp_(ema, [p.detach() for p in model.parameters()], 0.5)\nwith torch.no_grad():\n"
        "    for p, e in zip(model.parameters(), ema):\n        p.copy_(e)", at="end", needs="ema",
    ),
    "zero_in_place": Statement("optimizer.zero_grad(set_to_none=False)", at="zero"),
    "no_zero": Statement("if step == 0:\n    optimizer.zero_grad()", at="zero", inexact=True),
    "compiled_step": Statement("compiled(optimizer.step)()", at="step", breaks=True),
    "two_steps": Statement("optimizer.step()\noptimizer.step()", at="step"),
    "no_grad_step": Statement("if step % 2 == 1:\n    optimizer.step()", at="step"),
}  # fmt: skip

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "sgd_momentum": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)",
    "adamw": "torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, eps=1e-3)",
    "adamw_single": "torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, eps=1e-3, foreach=False)",
    "adamw_fused": "torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, eps=1e-3, fused=True)",
}
