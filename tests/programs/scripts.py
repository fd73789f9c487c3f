"""Statements that whole training scripts are made of: adapters, adversaries, averaged models,
files, modes, attention with functions of its own, and notebooks whose cells run again.

They are drawn apart (`draw.make_script`), so that seeds of other programs stay as they are.
"""

from __future__ import annotations

from programs.grammar import parse

SCRIPT_FORWARD = parse(
    """
-- mode
x = x * (0.5 if {m}.training else 1.5)
-- adapter
init: self.base = nn.Linear({d}, {d}).requires_grad_(False)
init: self.low, self.high = nn.Linear({d}, 2, bias=False), nn.Linear(2, {d}, bias=False)
init: self.is_merged = False
y = self.base(x)
x = torch.tanh(y if self.is_merged else y + self.high(self.low(x)))
-- adapter_of_weight
init: self.low_rank = nn.Parameter(torch.ones(2, {d}) * 0.1)
x = torch.tanh(F.linear(x, {m}.weight.detach() + self.low_rank.T @ self.low_rank))
-- flex
with torch.no_grad():
    bias = {m}.bias
    y = flex_attention(*[x.detach()[None, None]] * 3, score_mod=lambda score, b, h, i, j: score + bias[j % {d}])
x = x + y[0, 0]
-- flex_mask
init: self.reach = nn.Parameter(torch.ones(1), requires_grad=False)
near = lambda b, h, i, j: i - j <= self.reach[0]
with torch.no_grad():
    mask = create_block_mask(near, None, None, len(x), len(x), device='cpu')
    y = flex_attention(*[x.detach()[None, None]] * 3, block_mask=mask)
x = x + y[0, 0]
"""  # noqa: E501
)

# A backward inside of a backward, said from seed `draw.FROM` on: earlier seeds stay as they are.
NESTED_FORWARD = parse(
    """
-- gradient_in_hook breaks
y = {m}(x)
if y.requires_grad:
    given = y.detach().requires_grad_()
    again = {m}(given)
    y.register_hook(lambda grad: grad + torch.autograd.grad(again, given, grad, retain_graph=True)[0])
x = torch.tanh(y)
-- checkpoint_itself breaks needs=one_output
call = lambda y, i: checkpoint(lambda z, j: self(z, j), y, i, use_reentrant=True)
x = x + (call(x[: len(x) // 2], ids[: len(x) // 2]).mean() if len(x) > 1 else 0.0)
"""  # noqa: E501
)

SCRIPT_SETUP = parse(
    """
-- shard_again at=sharded
try:
    fully_shard(model)
except (RuntimeError, ValueError, AssertionError):
    pass
"""
)

SCRIPT_LOOP = parse(
    """
-- adversary
init: critic = compiled(fully_shard(nn.Linear(8, 1)))
init: critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
made = model(x, ids)
critic_optimizer.zero_grad()
(critic(made.detach()).mean() - critic(torch.ones_like(made)).mean()).backward()
critic_optimizer.step()
loss = made.square().mean() - critic(made).mean()
-- adversary_penalty
init: critic = fully_shard(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)))
init: critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
made = model(x, ids)
critic_optimizer.zero_grad()
between = (made.detach() * 0.5 + 0.1).requires_grad_()
slope, = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
(critic(made.detach()).mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
critic_optimizer.step()
loss = made.square().mean() - critic(made).mean()
-- averaged at=end
init: averaged = torch.optim.swa_utils.AveragedModel(getattr(model, '_orig_mod', model))
averaged.update_parameters(getattr(model, '_orig_mod', model))
with torch.no_grad():
    note(averaged(x.detach(), ids))
note(*averaged.module.parameters())
-- averaged_ema at=end
init: average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
init: averaged = fully_shard(Model()).requires_grad_(False)
init: averaged.load_state_dict(getattr(model, '_orig_mod', model).state_dict())
init: averaged = compiled(averaged)
average(list(averaged.parameters()), list(model.parameters()), step)
with torch.no_grad():
    note(averaged(x.detach(), ids))
note(*averaged.parameters())
-- merge at=end needs=adapter
with torch.no_grad():
    model.base.weight.add_(model.high.weight @ model.low.weight)
model.is_merged = True
with torch.no_grad():
    note(model(x, ids))
model.is_merged = False
with torch.no_grad():
    model.base.weight.sub_(model.high.weight @ model.low.weight)
-- file at=end
torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, f'{folder}.{rank}')
saved = torch.load(f'{folder}.{rank}', weights_only=False)
model.load_state_dict(saved['model'])
optimizer.load_state_dict(saved['optimizer'])
-- modes at=start
model.a.train(step % 2 == 0)
-- eval_loss at=start
model.eval()
note(model(x, ids).square().mean())
model.train()
-- eval_trains at=start
model.train(step % 2 == 0)
"""
)
