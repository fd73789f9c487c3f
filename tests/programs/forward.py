"""Statements of a forward: reads and writes of parameters, calls, collectives, graph breaks."""

from __future__ import annotations

from programs.grammar import parse

ROUTED, ALONE = "routed", "alone"
PLAIN = parse(
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
"""  # noqa: E501
)
