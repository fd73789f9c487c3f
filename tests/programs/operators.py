"""Statements of a forward whose parameters are read by something of torch's: transformations,
control flow, checkpointing, parametrizations, recurrent cells, functions with a backward of their
own.
"""

from __future__ import annotations

from programs.grammar import parse

OPERATORS = parse(
    """
-- func_grad for_block needs=pure
x = x + 0.1 * torch.func.grad(lambda y: {m}(y).square().sum())(x)
-- func_grad_own
own = dict({m}.named_parameters())
grads = torch.func.grad(lambda p: torch.func.functional_call({m}, p, (x,)).square().mean())(own)
x = torch.tanh(torch.func.functional_call({m}, {k: own[k] - 0.1 * grads[k] for k in own}, (x,)))
-- per_sample
own = dict({m}.named_parameters())
one = torch.func.grad(lambda p, row: torch.func.functional_call({m}, p, (row,)).square().sum())
x = x + 0.1 * torch.vmap(one, (None, 0))(own, x)['bias']
-- vmap for_block needs=pure
x = torch.tanh(torch.vmap({m})(x))
-- vmap_weights
x = torch.vmap(lambda s, row: torch.tanh(F.linear(row, {m}.weight * s, {m}.bias)))(x.mean(1), x)
-- ensemble
both = {'weight': torch.stack([{m}.weight, {m}.weight * 0.5]), 'bias': torch.stack([{m}.bias] * 2)}
x = torch.tanh(torch.vmap(lambda p: torch.func.functional_call({m}, p, (x,)))(both).sum(0))
-- jvp for_block needs=pure
x = sum(torch.func.jvp(lambda y: torch.tanh({m}(y)), (x,), (torch.ones_like(x),)))
-- vjp for_block needs=pure
y, back = torch.func.vjp({m}, x)
x = torch.tanh(y) + 0.1 * back(torch.ones_like(y))[0]
-- jacobian
x = x + torch.vmap(torch.func.jacrev({m}))(x).mean(2)
-- cond
x = torch.cond(x.sum() > 0, lambda y: torch.tanh({m}(y)), lambda y: y * 0.5, (x,))
-- cond_read
x = torch.cond(x.sum() > 0, lambda y: F.linear(y, {m}.weight), lambda y: y + {m}.bias, (x,))
-- cond_two
x = torch.cond(x.sum() > 0, lambda y: {m}(y) + self.side(y), lambda y: self.side(y) * 0.5, (x,))
init: self.side = nn.Linear({d}, {d})
-- scan
def step(state, row):
    return torch.tanh({m}(state)), state + row
x = scan(step, torch.zeros_like(x[0]), x)[1]
-- while_loop
with torch.no_grad():
    body = lambda i, y: (i + 1, torch.tanh({m}(y)))
    y = while_loop(lambda i, y: i < 2, body, (torch.tensor(0), x))[1]
x = x + y
-- map
x = map_rows(lambda row: torch.tanh({m}(row)), x)
-- checkpoint_part
part = lambda y: torch.tanh({m}(y)) + {m}.weight.sum(0)
x = checkpoint(part, x, use_reentrant=False)
-- checkpoint_nested for_block
part = lambda y: torch.tanh(checkpoint({m}, y, use_reentrant=False))
x = checkpoint(part, x, use_reentrant=False)
-- checkpoint_selective for_block
x = torch.tanh(checkpoint({m}, x, use_reentrant=False, context_fn=save_products))
-- weight_norm
init: self.normed = nn.utils.parametrizations.weight_norm(nn.Linear({d}, {d}))
x = torch.tanh(self.normed(x))
-- weight_norm_hook
init: self.normed_before = nn.utils.weight_norm(nn.Linear({d}, {d}))
x = torch.tanh(self.normed_before(x))
-- spectral_norm
init: self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear({d}, {d}))
x = torch.tanh(self.spectral(x))
-- parametrized
init: self.bounded = nn.Linear({d}, {d})
init: nn.utils.parametrize.register_parametrization(self.bounded, 'weight', nn.Tanh())
x = torch.tanh(self.bounded(x)) + self.bounded.weight.sum(0)
-- parametrized_once
init: self.bounded = nn.Linear({d}, {d})
init: nn.utils.parametrize.register_parametrization(self.bounded, 'weight', nn.Tanh())
with nn.utils.parametrize.cached():
    x = torch.tanh(self.bounded(torch.tanh(self.bounded(x))))
-- gru_cell
init: self.cell = nn.GRUCell({d}, {d})
x = self.cell(x, x)
-- rnn_loop
init: self.rnn_cell = nn.RNNCell({d}, {d})
h = torch.zeros_like(x)
for _ in range(3):
    h = self.rnn_cell(x, h)
x = x + h
-- lstm breaks
init: self.lstm = nn.LSTM({d}, {d})
x = self.lstm(x)[0]
-- attention
init: self.attention = nn.MultiheadAttention({d}, 1)
x = x + self.attention(x, x, x)[0]
-- function
x = scaled(x, {m}.weight)
-- custom_op
x = torch.ops.programs.scaled(x, {m}.weight)
-- vector
x = x * nn.utils.parameters_to_vector({m}.parameters()).square().sum()
-- hook breaks
if x.requires_grad:
    x.register_hook(lambda grad: grad * 0.5)
-- autocast for_block
with torch.autocast('cpu', torch.bfloat16):
    y = {m}(x)
x = torch.tanh(y.to(x.dtype))
"""
)
