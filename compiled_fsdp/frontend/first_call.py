"""Checks that are made once, before the first forward of an outermost module and before an
optimizer's first step.

The mistakes that these catch otherwise show as a hang, as NaNs, or as a loss that does not fall.
"""

from __future__ import annotations

import re
import weakref
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from compiled_fsdp.eager import optimizer_steps
from compiled_fsdp.eager.tree import TREES, Tree
from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.inspection.collect import after_first_step, has_trained
from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.torch_private.groups import is_alone
from compiled_fsdp.units.cutting import sharded_as
from compiled_fsdp.units.registered import Registered
from compiled_fsdp.wire.agreement import agree
from compiled_fsdp.wire.divergence import DivergenceError, describe
from compiled_fsdp.wire.ops import TRACED

from .stepped import look_at_params

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from compiled_fsdp.units.unit import Unit


# What torch says of an operation with a sharded tensor that it cannot do; tried on 2.11 to 2.15.
CAST = "are gathered in mp_policy.param_dtype"
OF_DTENSOR = ("got mixed torch.Tensor and DTensor", "does not have a sharding strategy registered")
OF_ACTIVATIONS = (
    ". Or the script makes DTensors of activations, as context_parallel does, and it is theirs"
)
EITHER = "With tensor parallelism that is either"
OF_SHARDING = "Sharding propagation failed"  # without a plain tensor: its own rules do not allow it


def check_same_model(units: Sequence[Unit]) -> None:
    """All ranks of a shard group must have cut the same parameters.

    Raises:
        DivergenceError: they have not; the text lists what differs, on every rank.
    """
    group = units[0].mesh_info.shard_group
    if is_alone(group):
        return
    lines = [
        f"{param.fqn}: {tuple(param.layout.shape)} {param.sharded.dtype}"
        + ("" if param.sharded.requires_grad else ", frozen")
        for unit in units
        for param in unit.params
    ]
    everyone = agree(group, "\n".join(["a model of these parameters", *lines]))
    if everyone is None:
        return
    known = {
        rank: text.splitlines()[1:]
        for rank, text in enumerate(everyone)
        if text.startswith("a model")
    }
    if len(known) < len(everyone):  # some do something else altogether
        raise DivergenceError(describe(group, everyone))
    common = set.intersection(*map(set, known.values()))
    texts = []
    for rank, theirs in known.items():
        only = [line for line in theirs if line not in common]
        shown = shortened(only) if only else "none: some are missing, or the order differs"
        texts.append(f"  rank {rank}: {len(theirs)} parameters; not on all ranks: {shown}")
    raise DivergenceError(
        "fully_shard: the ranks of a shard group have different models:\n" + "\n".join(texts)
    )


def check_devices(units: Iterable[Unit]) -> None:
    """Parameters may have been moved one by one since they were cut.

    Raises:
        RuntimeError: some are not where their mesh communicates, or not on the CPU if they are
            offloaded.
    """
    for unit in units:
        device = unit.mesh_info.device
        found = [
            (p.fqn, p.local.device) for p in unit.params if p.local.device.type != unit.rests_on
        ]
        if unit.offload is not None:
            found = [(fqn, on) for fqn, on in found if on.type != "meta"]  # gathering says so
        if found and unit.offload is not None:
            raise RuntimeError(
                f"{unit.name}: FSDP parameters should be materialized on CPU when enabling CPU "
                f"offloading; these are not: {found}. Leave the sharded model on the CPU, load a "
                'CPU state dict, or call module.to_empty(device="cpu")'
            )
        wrong = [fqn for fqn, _ in found]
        if wrong:
            raise RuntimeError(
                f"{unit.name}: parameters {shortened(wrong)} are not on {device.type}, where "
                "their mesh is, so they cannot be gathered. Move the whole sharded model "
                f"with .to({device.type!r})"
            )


def warn_unread(units: Sequence[Unit]) -> None:
    """After a step: a unit that nobody read is a mistake, or parameters that need not be there."""
    for unit in units:
        # All but those that gave way to a tied one.
        count = sum(bool(param.owners) for param in unit.params)
        if count and not unit.was_read and unit.key not in TRACED:
            warn_once(
                f"compiled_fsdp: unit {unit.name!r} was not gathered in the first step: nothing "
                f"called its forward or read its {count} parameters, so that step has not trained "
                "them. If another method than forward uses them, call "
                "register_fsdp_forward_method(module, name) for it. Where other steps call it "
                "(layer drop, a choice of experts), they train it"
            )


def explain_mixed(error: RuntimeError, unit: Unit, units: Iterable[Unit]) -> None:
    """Say in our words what DTensor says when an operation meets a sharded parameter.

    Raises:
        RuntimeError: it was that.
    """
    units, text = list(units), str(error)
    is_mixed = any(words in text for words in OF_DTENSOR) or bool(OF_FLEX.search(text))
    is_parallel = any(param.full for u in units for param in u.params)  # the user has DTensors, too
    if not is_mixed and (OF_SHARDING not in text or is_parallel):
        return
    if EITHER in text:
        return  # a unit inside has said it
    others = [u.name for u in units if u is not unit]
    strays = _of_no_unit(units)
    how = "with a plain tensor" if is_mixed else f"as DTensor cannot ({text.splitlines()[0]})"
    told = f"{unit.name}: its forward used a parameter that is sharded at that moment, {how}"
    if strays:
        raise RuntimeError(
            f"{told}: {shortened(strays)} are DTensors under names that no unit has, since they "
            "were registered after fully_shard (by a parametrization such as weight_norm, by "
            "pruning, or as a Parameter made of a sharded one), and nothing gathers them. Register "
            "them before fully_shard"
        ) from error
    if replaced := _replaced(units):
        raise RuntimeError(
            f"{told}: {shortened(replaced)} are DTensors that functional_call or an assignment "
            "has put in the place of the units' own, and nothing gathers these. Put full tensors "
            "there, as full_tensor() makes them; gradients by these are each rank's own"
        ) from error
    if is_parallel:
        _raise_of_either(error, unit)
    own = OF_ACTIVATIONS if OF_DTENSOR[1] in text or not is_mixed else ""
    if not others:
        raise RuntimeError(
            f"{told}: no other unit has any, so it is one that state_dict() gave, or that was kept "
            "from before the call. Read the module's attributes inside forward, or call "
            f"full_tensor() on it{own}"
        ) from error
    raise RuntimeError(
        f"{told}: one of another unit ({shortened(others)}), "
        "whose own forward is not running. Give both modules to one call, fully_shard([a, b]), or "
        f"call unshard() on the other before and reshard() after it{own}"
    ) from error


def _raise_of_either(error: RuntimeError, unit: Unit) -> NoReturn:
    """Where gathered parameters, and activations, are DTensors of the user's own."""
    lines = str(error).splitlines()
    said = next((line for line in lines if any(words in line for words in OF_DTENSOR)), lines[0])
    raise RuntimeError(
        f"{unit.name}: {said.strip()} {EITHER} an "
        "activation that is a DTensor beside one that is plain: make both the same in the plan of "
        "parallelize_module (use_local_output, PrepareModuleInput), or by to_local() or "
        "distribute_tensor. Or the forward used a parameter of another unit, which is sharded at "
        "that moment: give both modules to one call, fully_shard([a, b])"
    ) from error


def _of_no_unit(units: Iterable[Unit]) -> list[str]:
    """The parameters of sharded modules that are DTensors, under names that no unit knows."""
    units = list(units)
    owners = {(id(m), name) for u in units for param in u.params for m, name in param.owners}
    roots = [module for unit in units if unit.is_outermost for module in unit.modules]
    modules = [entry for root in roots for entry in root.named_modules()]
    return [
        f"{path}.{name}" if path else name
        for path, module in modules
        for name, p in module._parameters.items()
        if isinstance(p, DTensor) and (id(module), name) not in owners
    ]


def _replaced(units: Iterable[Unit]) -> list[str]:
    """The parameters in whose place a user has put DTensors that no unit has."""
    return [
        param.fqn
        for unit in units
        for param in unit.params
        if any(
            name in module._parameters.replaced and isinstance(module._parameters[name], DTensor)
            for module, name in param.owners
            if isinstance(module._parameters, Registered)
        )
    ]


# FlexAttention, called outside of a graph, of a function that reads a sharded parameter.
OF_FLEX = re.compile(r"call_function flex_attention\(.*DTensor\(")
# What `nn.Module` says where a parameter is registered that is none.
OF_MODULE = "(torch.nn.Parameter or None expected)"


def explain_registered(error: TypeError, unit: Unit) -> None:
    """Say why a forward that Dynamo has traced in part cannot register a parameter that it reads.

    Raises:
        TypeError: it did.
    """
    if OF_MODULE in str(error) and unit.name not in str(error):
        raise TypeError(
            f"{unit.name}: its compiled forward registers what is no parameter ({error}). In a "
            "graph a sharded parameter that is read, self.a.weight say, is the gathered tensor, "
            "which no module takes for a parameter. Tie parameters between calls, or in a function "
            "decorated with torch.compiler.disable"
        ) from error


# What kernels of torch say of two dtypes.
OF_DTYPES = re.compile(
    r"same dtype|type \(.*\) should be the same|expected scalar type|"
    r"expect parameter to have scalar type"
)


def explain_dtypes(error: RuntimeError, unit: Unit) -> None:
    """Say what may have brought another dtype into the forward of a unit with a `param_dtype`.

    Raises:
        RuntimeError: buffers have another, or inputs are not cast.
    """
    policy = unit.mp_policy
    if policy.param_dtype is None or not OF_DTYPES.search(str(error)) or CAST in str(error):
        return
    buffers = {
        name: b.dtype
        for module in unit.modules
        for name, b in module.named_buffers()
        if b.is_floating_point() and b.dtype != policy.param_dtype
    }
    found = [f"buffer {name} is {dtype}" for name, dtype in buffers.items()]
    if not policy.cast_forward_inputs:
        found.insert(0, "inputs are not cast (cast_forward_inputs=False)")
    if found:
        raise RuntimeError(
            f"{unit.name}: its forward mixed dtypes ({str(error).splitlines()[0]}). Its parameters "
            f"{CAST}, {policy.param_dtype}, and {shortened(found)}, as with torch's FSDP. Cast in "
            "forward what is computed with them, x.to(self.weight.dtype) say, or the buffers"
        ) from error


def check_buffers(
    module: nn.Module, unit: Unit, from_meta: Iterable[tuple[str, weakref.ref[Tensor]]]
) -> None:
    """A model that was built on the meta device: no buffer may have been forgotten, nor differ
    between ranks.

    Raises:
        RuntimeError: buffers, non-persistent ones included, that nobody wrote since `to_empty`.
    """
    buffers = dict(module.named_buffers())
    forgotten = [
        name
        for name, reference in from_meta
        if (tensor := reference()) is not None
        and buffers.get(name) is tensor
        and tensor._version == 0
        and tensor.numel()
    ]
    if forgotten:
        raise RuntimeError(
            f"{unit.name}: buffers {shortened(forgotten)} hold whatever was in memory: they were "
            "on the meta device, and nothing wrote them since to_empty(). Initialise them "
            "(non-persistent ones are not in a state dict), for example with reset_parameters()"
        )
    group = unit.mesh_info.shard_group
    locals_ = {name: local_tensor(b) for name, b in buffers.items()}
    numeric = {
        name: b
        for name, b in locals_.items()
        if b.device == unit.mesh_info.device and not b.is_complex()
    }
    if not numeric or is_alone(group):
        return
    sums = torch.stack(
        [b.detach().double().nan_to_num().mul(_weights(b)).sum() for b in numeric.values()]
    )
    differs = (_gathered(sums, group).view(-1, len(sums)) != sums).any(0).tolist()
    names = [name for name, is_other in zip(numeric, differs, strict=True) if is_other]
    if names:
        warn_once(
            f"compiled_fsdp: buffers {shortened(names)} differ between the ranks before the first "
            "step. FSDP never synchronises buffers: if they should be equal, broadcast them from "
            "one rank after to_empty()"
        )


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, tensor, group=group)
    return torch.cat(pieces)


def _weights(tensor: Tensor) -> Tensor:
    """So that permuted values do not add up to the same."""
    return torch.arange(1, tensor.numel() + 1, dtype=torch.float64, device=tensor.device).view(
        tensor.shape
    )


_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def check_optimizers() -> None:
    """From now on, look at every optimizer before its first step, and count its steps."""
    optimizer_steps.before(_check_optimizer)
    optimizer_steps.before(_say_not_finalized)
    optimizer_steps.before(look_at_params)
    optimizer_steps.after(_after_step)


_trained: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[Tree]]] = (
    weakref.WeakKeyDictionary()
)


def _after_step(optimizer: torch.optim.Optimizer) -> None:
    """Count the step for the models that it trains; the first one is summed up, on rank 0.

    A step before any backward is none: `torch.distributed.checkpoint` makes one to find out what
    state an optimizer has. One behind a forward that was to have a backward is announced.
    """
    if optimizer not in _trained:
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        _trained[optimizer] = [weakref.ref(tree) for tree in list(TREES) if _holds(tree, params)]
    for reference in _trained[optimizer]:
        tree = reference()
        if tree is None or not tree.members:
            continue
        is_step = tree.clock.count or has_trained([runtime.unit for runtime in tree.members])
        if is_step and tree.clock.tick(optimizer):
            after_first_step(tree)
        elif not is_step and tree.was_recorded:
            _say_no_gradients(optimizer, tree)


def _say_no_gradients(optimizer: torch.optim.Optimizer, tree: Tree) -> None:
    """A step without a gradient, behind a forward with them: `backward(inputs=...)` asks autograd
    for those of tensors that no graph has seen, and is silent about it.
    """
    units = [runtime.unit for runtime in tree.in_order()]
    params = [p for unit in units for p in unit.params if p.sharded.requires_grad]
    if any(unit.has_gradients for unit in units) or any(p.sharded.grad is not None for p in params):
        return
    if not params:
        return
    warn_once(
        f"compiled_fsdp: {type(optimizer).__name__}.step(): no gradient has come to its parameters "
        f"({shortened([p.fqn for p in params])}), whose model was called in grad mode, so that the "
        "step changes nothing. "
        "loss.backward(inputs=[*model.parameters()]) gives none to sharded parameters, which are "
        "not what the graph was recorded of: call backward without `inputs`, and freeze what is to "
        "get no gradient (p.requires_grad_(False))"
    )


def _holds(tree: Tree, params: set[int]) -> bool:
    return any(id(p.sharded) in params for runtime in tree.members for p in runtime.unit.params)


def _say_not_finalized(optimizer: torch.optim.Optimizer) -> None:
    """A step comes before the user has finalized the backward."""
    for tree in [tree for tree in list(TREES) if tree.finalization.held]:
        held = sorted(runtime.unit.name for runtime in tree.finalization.held)
        if _holds(tree, {id(p) for group in optimizer.param_groups for p in group["params"]}):
            warn_once(
                f"compiled_fsdp: {type(optimizer).__name__}.step() before the backward of "
                f"{held[0]} is finalized, which set_manual_backward_finalization(True) leaves to "
                "you: gradients may be missing, and the next forward may use parameters from "
                "before the step. Call finalize_backward() on it first, and wait() on what that "
                "returns with async_op=True"
            )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """A parameter that was cut is not what the model trains any more, and its state is cut with it.

    Raises:
        RuntimeError: the optimizer holds one, or the state of a whole one.
    """
    if optimizer in _checked:
        return
    _checked.add(optimizer)
    _check_state(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [sharded_as[p][1].fqn for p in params if p in sharded_as]
    if stale:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: fully_shard replaced {len(stale)} of its parameters "
            f"({stale[0]!r} is the first) after the optimizer was built, so the step would change "
            "nothing that the model uses. Build the optimizer after fully_shard"
        )


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    """Whether state that was loaded is as large as the shards that it belongs to; asked again when
    some is loaded later. Only of torch's own optimizers: others may keep what they like.

    Raises:
        RuntimeError: it is of whole parameters.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for param, state in optimizer.state.items():
        if not isinstance(param, DTensor) or local_tensor(param).shape == param.shape:
            continue
        full = [name for name, value in state.items() if _is_plain(value, param.shape)]
        if full:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: the state {shortened(full)} of a parameter of "
                f"shape {tuple(param.shape)} is a full tensor, and the parameter a shard. Let "
                "torch.distributed.checkpoint.state_dict cut it: set_optimizer_state_dict(model, "
                "optimizer, state_dict, options=StateDictOptions(full_state_dict=True))"
            )
    optimizer.register_load_state_dict_post_hook(_checked.discard)


def _is_plain(value: object, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == shape
