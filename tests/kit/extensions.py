"""Tensors that bring an all-gather of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

log: list[Any] = []  # what the extensions below were told


class Wrapped(torch.Tensor):
    """A tensor around another; every op runs on that, and what it makes is wrapped again."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            dtype=data.dtype,
            device=data.device,
            requires_grad=data.requires_grad,
        )

    def __init__(self, data: Tensor) -> None:
        self.data_inside = data

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data_inside})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = tree_map_only(
            Wrapped, lambda t: t.data_inside, (args, kwargs or {})
        )
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            return args[0]
        return tree_map_only(Tensor, cls, result)

    def __tensor_flatten__(self) -> Any:
        return ["data_inside"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["data_inside"])


class Quantised(Wrapped):
    """Gathered as bytes and one scale for each rank: two inputs of different dtypes; the full
    parameter is a plain tensor.
    """

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: Any,
        outer_stride: Any,
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> Any:
        log.append(
            (
                "pre",
                mesh.ndim,
                mesh.size(),
                outer_size,
                outer_stride,
                type(module).__name__.removeprefix("FSDP"),
                mp_policy,
            )
        )
        data = self.data_inside
        rows = -(-outer_size[0] // mesh.size())
        if data.shape[0] < rows:
            data = torch.cat([data, data.new_zeros(rows - data.shape[0], *data.shape[1:])])
        scale = data.abs().max().clamp(min=1e-8).view(*[1] * data.dim()) / 127
        return self.inputs((data / scale).round().to(torch.int8), scale), outer_size[0]

    def inputs(self, data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return data, scale

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        data, scales = outputs
        log.append(("post", data.dtype, data.shape, scales.shape, metadata, dtype, out is None))
        ranks = scales.shape[0]
        full = (
            (data.view(ranks, -1).to(scales.dtype) * scales.view(ranks, 1))
            .view_as(data)[:metadata]
            .to(dtype)
            .contiguous()
        )
        if out is None:
            return full, (full,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(full)
        return None


def two_layers(cls: type[Wrapped], rows: int = 8) -> nn.Sequential:
    """The weights are extensions, the biases are not."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, rows), nn.Tanh(), nn.Linear(rows, 4))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(cls(layer.weight.detach().clone()))
    return model


class Codes(torch.Tensor):
    """A frozen matrix of int8 codes and a scale for each row, as for QLoRA: the full one is such a
    tensor too, and what computes with it gets what the codes stand for. It can be cut by
    `torch.chunk`, and not by `narrow`.
    """

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.size(), dtype=scales.dtype, device=codes.device
        )

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, data: Tensor) -> Codes:
        scales = data.abs().amax(1, keepdim=True) / 127
        return cls((data / scales).round().to(torch.int8), scales)

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func is aten.slice.Tensor and (args[2:3] != (0,) or args[3] < args[0].shape[0]):
            raise NotImplementedError("Codes are cut by torch.chunk")
        if func is aten.new_zeros.default:
            rows = args[1][0]
            return cls(args[0].codes.new_zeros(args[1]), args[0].scales.new_zeros(rows, 1))
        if func is aten.copy_.default:
            args[0].codes.copy_(args[1].codes)
            args[0].scales.copy_(args[1].scales)
            return args[0]
        if func is aten.split.Tensor:
            return [*map(cls, func(args[0].codes, *args[1:]), func(args[0].scales, *args[1:]))]
        # stock keeps a flat view, of which it asks nothing but the class
        is_whole = func is aten.as_strided.default and tuple(args[1]) == tuple(args[0].shape)
        if is_whole or (func is aten.view.default and args[1] == [-1]):
            return cls(args[0].codes, args[0].scales)
        if func in (aten.detach.default, aten.clone.default, aten.slice.Tensor):
            return cls(func(args[0].codes, *args[1:]), func(args[0].scales, *args[1:]))
        return func(*tree_map_only(Codes, lambda t: t.codes * t.scales, args), **kwargs)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.codes, self.scales), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return None if out is not None else (Codes(*outputs), outputs)
