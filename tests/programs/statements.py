"""What random programs are made of: statements of a forward, of the set-up around sharding, and of a
training loop.

Each is a few lines of Python under a heading: its name, and what it needs. `{m}` is a linear layer
(`self.up` in a block, `self.a` in the model), `{d}` the width. A forward statement turns `x` [rows,
d] into another `x`; `ids` [rows] are tokens.

    at=PLACE    where in the set-up or in the loop (`source.py`); in the loop forward, step and
                zero replace that line
    breaks      Dynamo cannot trace it, so no full graph is asked for
    for_block   `{m}` may be a block, too
    needs=WHAT  see `legal.py`
    init: LINE  for `__init__`

`routed` sends each row to one of two ranks, where `{m}` is computed, and back; `alone` breaks the
graph on one rank. They are drawn apart (`draw.make_routed`, `draw.make_alone`), so that the
programs of other seeds stay what they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Statement:
    """Lines of source, and what they need."""

    lines: tuple[str, ...] = ()
    init: tuple[str, ...] = ()
    at: str = "forward"
    breaks: bool = False
    for_block: bool = False
    needs: str = ""


def parse(text: str) -> dict[str, Statement]:
    """Statements by name."""
    found: dict[str, Statement] = {}
    name = ""
    for line in text.strip().splitlines():
        if line.startswith("-- "):
            name, *flags = line.split()[1:]
            said = dict(flag.split("=") for flag in flags if "=" in flag)
            found[name] = Statement(
                (),
                (),
                said.get("at", "forward"),
                "breaks" in flags,
                "for_block" in flags,
                said.get("needs", ""),
            )
        elif line.startswith("init: "):
            found[name] = replace(
                found[name], init=(*found[name].init, line.removeprefix("init: "))
            )
        else:
            found[name] = replace(found[name], lines=(*found[name].lines, line))
    return found


ROUTED, ALONE = "routed", "alone"
FORWARD = parse(
    """
-- call for_block
x = torch.tanh({m}(x))
-- read
x = x + {m}.weight.sum(0)
-- linear
x = torch.tanh(F.linear(x, {m}.weight, {m}.bias))
-- slice
x = x + {m}.weight[1:].mean(0) * {m}.bias
-- alias
w = {m}.weight
with torch.no_grad():
    {m}.weight.mul_(0.9)
x = torch.tanh(F.linear(x, w))
-- getattr
x = x + getattr({m}, 'weight').sum(0) + {m}._parameters['bias']
-- detach
x = x + {m}.weight.detach().mean(0)
-- substitute
w = torch.tanh(x.T @ x)
x = torch.tanh(torch.func.functional_call({m}, {'weight': w}, (x,)))
-- substitute_own
w = {'weight': {m}.weight * 0.5}
x = torch.tanh(torch.func.functional_call({m}, w, (x,)))
-- substitute_buffer
init: self.register_buffer('generated', torch.eye({d}))
x = torch.tanh(torch.func.functional_call({m}, {'weight': self.generated}, (x,)))
-- clamp_
with torch.no_grad():
    {m}.weight.clamp_(-0.2, 0.2)
-- data_clamp_
{m}.weight.data.clamp_(-0.2, 0.2)
-- copy_
with torch.no_grad():
    {m}.weight.copy_({m}.weight.clamp(-0.2, 0.2))
-- data_copy_
{m}.weight.data.copy_({m}.weight.data * 0.9)
-- data_assign
{m}.weight.data = {m}.weight.data * 0.9
-- detach_mul_
{m}.weight.detach().mul_(0.9)
-- index_write
with torch.no_grad():
    {m}.weight[0] = 0.1
-- foreach_mul_
with torch.no_grad():
    torch._foreach_mul_([{m}.weight, {m}.bias], 0.9)
-- foreach_data
torch._foreach_mul_([p.data for p in {m}.parameters()], 0.9)
-- normalize
with torch.no_grad():
    {m}.weight.div_({m}.weight.norm(dim=1, keepdim=True))
-- embed
init: self.embed = nn.Embedding(8, {d})
x = x + self.embed(ids)
-- embed_max_norm
init: self.embed = nn.Embedding(8, {d}, max_norm=0.5)
x = x + self.embed(ids)
-- embed_twice
init: self.embed = nn.Embedding(8, {d}, max_norm=0.5)
x = x + self.embed(ids) * self.embed.weight.sum(0)
-- momentum
init: self.slow = nn.Linear({d}, {d}).requires_grad_(False)
with torch.no_grad():
    for p, q in zip(self.slow.parameters(), {m}.parameters()):
        p.lerp_(q, 0.1)
x = x + self.slow(x)
-- momentum_data
init: self.slow = nn.Linear({d}, {d}).requires_grad_(False)
for p, q in zip(self.slow.parameters(), {m}.parameters()):
    p.data = p.data * 0.9 + q.data * 0.1
x = x + self.slow(x)
-- momentum_data_mul_
init: self.slow = nn.Linear({d}, {d}).requires_grad_(False)
for p, q in zip(self.slow.parameters(), {m}.parameters()):
    p.data.mul_(0.9).add_(q.data, alpha=0.1)
x = x + self.slow(x)
-- momentum_foreach
init: self.slow = nn.Linear({d}, {d}).requires_grad_(False)
with torch.no_grad():
    torch._foreach_lerp_(list(self.slow.parameters()), list({m}.parameters()), 0.1)
x = x + self.slow(x)
-- norm_of_all
x = x * sum(p.square().sum() for p in self.parameters())
-- norm_of_layer
x = x * sum(p.square().sum() for p in {m}.parameters())
-- named
x = x + sum(p.sum() for name, p in {m}.named_parameters() if name.endswith('weight'))
-- dtype
if next(self.parameters()).dtype == torch.float32:
    x = x * 2
-- dtype_of_layer
if {m}.weight.dtype == torch.float32:
    x = x * 2
-- finfo
x = x.clamp(min=torch.finfo(next(self.parameters()).dtype).min / 2)
-- numel
x = x * (sum(p.numel() for p in self.parameters()) / 100)
-- state_dict breaks
x = x + {m}.state_dict()['weight'].sum()
-- buffer
init: self.register_buffer('mean', torch.zeros({d}))
self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
x = x - self.mean
-- buffer_assign
init: self.register_buffer('mean', torch.zeros({d}))
self.mean = self.mean * 0.9 + x.detach().mean(0)
x = x - self.mean
-- counter
init: self.register_buffer('count', torch.zeros(1))
self.count += 1
x = x * self.count
-- batch_norm
init: self.bn = nn.BatchNorm1d({d})
x = self.bn(x)
-- no_grad_call for_block
with torch.no_grad():
    y = {m}(x)
x = x + y
-- inference_call breaks for_block
with torch.inference_mode():
    y = {m}(x)
x = x + y.clone()
-- no_grad_after for_block
y = {m}(x)
with torch.no_grad():
    z = {m}(y)
x = torch.tanh(y) + z
-- checkpoint for_block
x = torch.tanh(checkpoint({m}, x, use_reentrant=False))
-- checkpoint_reentrant breaks for_block
x = torch.tanh(checkpoint({m}, x, use_reentrant=True))
-- all_reduce
x = x + funcol.all_reduce(x.detach(), 'sum', dist.group.WORLD) * 0.1
-- dist_all_reduce
y = x.detach().clone()
dist.all_reduce(y)
x = x + y * 0.1
-- all_to_all
y = funcol.all_to_all_single_autograd(x, None, None, dist.group.WORLD)
x = x + funcol.wait_tensor(y) * 0.1
-- all_to_all_twice
sizes = [len(x) // world] * world
y = torch.ops._c10d_functional.all_to_all_single(x.detach(), sizes, sizes, group_name)
wait = torch.ops._c10d_functional.wait_tensor
x = x + wait(y) + wait(y)
-- routed for_block
init: torch._dynamo.config.capture_scalar_outputs = True
init: torch._dynamo.config.capture_dynamic_output_shape_ops = True
to = (x[:, 0] > 0).long()
order = to.argsort(stable=True)
counts = torch.stack([(to == r).sum() for r in range(world)])
theirs = funcol.wait_tensor(funcol.all_to_all_single(counts, [1] * world, [1] * world, dist.group.WORLD))
sent, received = counts.tolist(), theirs.tolist()
y = funcol.wait_tensor(funcol.all_to_all_single_autograd(x[order], received, sent, dist.group.WORLD))
y = torch.tanh({m}(y)).to(x.dtype)
y = funcol.wait_tensor(funcol.all_to_all_single_autograd(y, sent, received, dist.group.WORLD))
x = x + torch.zeros_like(x).index_copy(0, order, y)
-- break breaks
torch._dynamo.graph_break()
-- alone breaks
if rank == 0:
    torch._dynamo.graph_break()
-- item breaks
x = x * (1.0 if x.sum().item() > 1e9 else 0.5)
-- disabled breaks
x = disabled(x)
-- disabled_call breaks for_block
x = torch._dynamo.disable({m})(x)
-- experts breaks for_block needs=no_collective
chosen = (x[:, 0] > 0).nonzero().flatten()
x = x.index_add(0, chosen, torch.tanh({m}(x[chosen])))
-- data_branch breaks
if x.sum() > 1e9:
    x = x * 2
-- raises
init: self.fails = False
if self.fails:
    raise ValueError('as asked')
-- hook_raises
init: self.fails = False
if self.fails:
    x.register_hook(raise_error)
-- try for_block
try:
    x = {m}(x)
    raise ValueError('as asked')
except ValueError:
    x = torch.tanh(x)
"""
)

SETUP = parse(
    """
-- tie_before at=before needs=ab
model.b.weight = model.a.weight
-- tie_after at=sharded needs=ab
model.b.weight = model.a.weight
-- tie_head_before at=before needs=embed
model.head.weight = model.embed.weight
-- tie_head_after at=sharded needs=embed
model.head.weight = model.embed.weight
-- share_after at=sharded needs=ab
model.b = model.a
-- to_float64 at=sharded
model.to(torch.float64)
-- load at=sharded
model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})
-- load_assign at=sharded
model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()}, assign=True)
-- to_empty at=sharded needs=meta
model.to_empty(device='cpu')
for i, p in enumerate(model.parameters()):
    nn.init.constant_(p, 0.1 + i / 50)
-- init at=sharded
for i, p in enumerate(model.parameters()):
    nn.init.constant_(p, 0.1 + i / 50)
-- freeze_a at=sharded
model.a.requires_grad_(False)
-- keep at=sharded
model.set_reshard_after_backward(False)
-- keep_forward at=sharded
model.set_reshard_after_forward(False)
-- prefetch at=sharded needs=unit_a
model.set_modules_to_forward_prefetch([model.a])
-- overlap at=ready
overlap_optimizer(model, optimizer)
-- overlap_in_backward at=ready needs=plain_loop
overlap_optimizer(model, optimizer, in_backward=True)
-- ema at=ready
ema = [p.detach().clone() for p in model.parameters()]
-- eval_first at=ready
with torch.no_grad():
    note(model(*batch(7)))
-- warm_double at=ready
model(*batch(7)).sum()
"""
)

LOOP = parse(
    """
-- input_grad at=loss
note(*torch.autograd.grad(loss, x, retain_graph=True))
-- input_backward at=loss
loss.backward(inputs=[x], retain_graph=True)
note(x.grad)
-- input_grad_after at=grads
note(*torch.autograd.grad(model(x, ids).mean(), x))
-- twice at=loss
loss.backward(retain_graph=True)
-- two_losses at=start
model(x, ids).mean().backward()
-- two_forwards
loss = model(x, ids).square().mean() + model(x * 0.5, ids).mean()
-- accumulate at=start
model.set_requires_gradient_sync(False)
model(x, ids).square().mean().backward()
model.set_requires_gradient_sync(True)
-- accumulate_input_grad at=start
model.set_requires_gradient_sync(False)
model(x, ids).square().mean().backward()
note(*torch.autograd.grad(model(x, ids).mean(), x))
model.set_requires_gradient_sync(True)
-- half_batch at=start needs=no_all_to_all
x, ids = x[:2].detach().requires_grad_(), ids[:2]
-- other_batch at=start
x, ids = (t.detach().repeat(1 + step, *[1] * (t.dim() - 1)) for t in (x, ids))
x.requires_grad_()
-- rank_batch at=start needs=no_collective
x, ids = (t.detach().repeat(1 + 3 * rank, *[1] * (t.dim() - 1)) for t in (x, ids))
x.requires_grad_()
-- one_row at=start needs=no_collective
x, ids = x[: 1 + rank].detach().requires_grad_(), ids[: 1 + rank]
-- no_input_grad at=start
x = x.detach()
-- freeze at=start
model.a.requires_grad_(step % 2 == 0)
-- unfreeze at=start
model.head.requires_grad_(step > 0)
-- deepcopy_state at=end
saved = copy.deepcopy(model.state_dict())
if step == 0:
    model.load_state_dict(saved)
-- rollback at=start
saved = copy.deepcopy(model.state_dict())
-- load_each at=end
model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
-- load_assign_each at=end
model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
{optimizer}
-- eval at=end
with torch.no_grad():
    note(model(x, ids))
-- eval_mode at=end
model.eval()
with torch.no_grad():
    note(model(x, ids))
model.train()
-- eval_before at=start
with torch.no_grad():
    note(model(x, ids))
-- eval_between at=loss
with torch.no_grad():
    note(model(x, ids))
-- inference at=end
with torch.inference_mode():
    note(model(x.detach(), ids))
-- unused_forward at=start
model(x, ids)
-- decay at=end
with torch.no_grad():
    for p in model.parameters():
        p.mul_(0.9)
-- decay_data at=end
for p in model.parameters():
    p.data.mul_(0.9)
-- decay_foreach at=end
with torch.no_grad():
    torch._foreach_mul_(list(model.parameters()), 0.9)
-- decay_before_backward at=loss
for p in model.head.parameters():
    p.data.mul_(1.0)
-- scale_grads at=grads
for p in model.parameters():
    if p.grad is not None:
        p.grad.mul_(0.5)
-- clip at=grads
note(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
-- caught at=start needs=raises
model.fails = True
try:
    model(x, ids)
except ValueError:
    pass
model.fails = False
-- caught_backward at=start needs=hook_raises
model.fails = True
try:
    model(x, ids).sum().backward()
except (ValueError, RuntimeError):
    pass
model.fails = False
optimizer.zero_grad()
-- unshard at=start needs=unit_a
model.a.unshard()
-- unshard_async at=start needs=unit_a
handle = model.a.unshard(async_op=True)
handle.wait()
-- wait_late at=start needs=unit_a
handle = model.a.unshard(async_op=True)
model(x, ids)
handle.wait()
-- wait_after_forward needs=unit_a
handle = model.a.unshard(async_op=True)
loss = model(x, ids).square().mean()
handle.wait()
-- reshard at=end needs=unit_a
model.a.reshard()
-- update_ema at=end needs=ema
torch._foreach_lerp_(ema, [p.detach() for p in model.parameters()], 0.5)
with torch.no_grad():
    for p, e in zip(model.parameters(), ema):
        p.copy_(e)
-- zero_in_place at=zero
optimizer.zero_grad(set_to_none=False)
-- no_zero at=zero
if step == 0:
    optimizer.zero_grad()
-- compiled_step at=step breaks
compiled(optimizer.step)()
-- two_steps at=step
optimizer.step()
optimizer.step()
-- no_grad_step at=step
if step % 2 == 1:
    optimizer.step()
"""
)

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "sgd_momentum": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)",
    "adamw": "torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)",
    "adamw_single": "torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3, foreach=False)",
    "adamw_fused": "torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3, fused=True)",
}
