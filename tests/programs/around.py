"""Statements of the set-up around sharding and of a training loop, and optimizers."""

from __future__ import annotations

from programs.grammar import parse

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
-- pre_hook at=before
model.a.register_forward_pre_hook(lambda module, given: (given[0] * 0.9,))
-- pre_hook_reads at=before
model.a.register_forward_pre_hook(lambda module, given: (given[0] + next(module.parameters()).sum(),))
-- pre_hook_after at=sharded
model.a.register_forward_pre_hook(lambda module, given: (given[0] + next(module.parameters()).sum(),))
-- forward_hook at=before
model.a.register_forward_hook(lambda module, given, y: y + next(module.parameters()).sum())
-- forward_hook_after at=sharded
model.a.register_forward_hook(lambda module, given, y: y * 0.9)
-- backward_hook at=before breaks
model.a.register_full_backward_hook(lambda module, given, got: (given[0] * 0.9,))
-- backward_pre_hook at=sharded breaks
model.a.register_full_backward_pre_hook(lambda module, got: (got[0] * 0.9,))
-- wrap_checkpoint at=before
model.a = checkpoint_wrapper(model.a)
-- post_grad_hook at=sharded needs=plain_loop
def halve(p):
    p.grad.mul_(0.5)
for p in model.parameters():
    p.register_post_accumulate_grad_hook(halve)
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
"""  # noqa: E501
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
-- penalty at=loss
loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
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
-- clip_value at=grads
nn.utils.clip_grad_value_(model.parameters(), 0.01)
-- assign_grads at=grads
for p in model.parameters():
    if p.grad is not None:
        p.grad = p.grad * 0.5
-- drop_grads at=grads
for p in model.head.parameters():
    p.grad = None
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
-- schedule at=end
init: schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
schedule.step()
-- change_lr at=start
optimizer.param_groups[0]['lr'] *= 0.5
-- ema_state at=end
init: average = {k: v.detach().clone() for k, v in model.state_dict().items()}
for k, v in model.state_dict().items():
    average[k].lerp_(v, 0.5)
note(*average.values())
-- optimizer_state at=end
optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
-- new_optimizer at=end
{optimizer}
-- checkpoint_save at=end
if step == 0:
    dcp.save({'model': model.state_dict()}, checkpoint_id=folder)
-- checkpoint_load at=start needs=saved
if step > 0:
    saved = {'model': model.state_dict()}
    dcp.load(saved, checkpoint_id=folder)
    model.load_state_dict(saved['model'])
-- checkpoint_states at=end
saved = dict(zip(('model', 'optimizer'), get_state_dict(model, optimizer)))
dcp.save(saved, checkpoint_id=folder)
dcp.load(saved, checkpoint_id=folder)
set_state_dict(model, optimizer, model_state_dict=saved['model'], optim_state_dict=saved['optimizer'])
-- full_state at=end
whole = StateDictOptions(full_state_dict=True)
set_model_state_dict(model, get_model_state_dict(model, options=whole), options=whole)
-- second at=step
init: second = torch.optim.AdamW(model.head.parameters(), lr=0.01, eps=1e-3)
optimizer.step()
second.step()
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
"""  # noqa: E501
)

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "sgd_momentum": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)",
    "adamw": "torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)",
    "adamw_single": "torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3, foreach=False)",
    "groups": (
        "torch.optim.SGD([{'params': [p], 'lr': 0.1 / (i + 1)} "
        "for i, p in enumerate(model.parameters())])"
    ),
    "adagrad": "torch.optim.Adagrad(model.parameters(), lr=0.05, eps=1e-3)",
    "but_head": (
        "torch.optim.SGD([p for n, p in model.named_parameters() if 'head' not in n], lr=0.1)"
    ),
    "muon": "muon([p for p in model.parameters() if p.ndim == 2], lr=0.02, ns_dtype=torch.float32)",
    "adamw_fused": "torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3, fused=True)",
}

# Of a whole step, what trains the parameters that an optimizer has not.
OTHERS = {
    "but_head": "torch.optim.AdamW(model.head.parameters(), lr=0.02, eps=1e-3)",
    "muon": "torch.optim.SGD([p for p in model.parameters() if p.ndim != 2], lr=0.1)",
}
