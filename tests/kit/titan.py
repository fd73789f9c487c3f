"""torchtitan on the CPU: its models, cut by its own functions with another `fully_shard`."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import fsdp as stock

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def on_cpu() -> Iterator[None]:
    """torchtitan takes its device when it is first imported, and CUDA where there is no
    accelerator.
    """
    from torchtitan.tools import utils as tools

    device = mock.patch.multiple(tools, device_type="cpu", device_module=torch.cpu)
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)  # as its `apply_compile`
    with device, scalars:
        yield


def built(api: Any, spec: Any, parallelism: Any, training: Any) -> tuple[Any, Any]:
    """A model of two layers with weights, and the meshes that it is cut over.

    api: whose `fully_shard`.
    """
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import ParallelDims, fsdp, utils

    utils.set_spmd_backend(parallelism.spmd_backend)
    config = spec.model
    config.layers = config.layers[:2]
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    model = config.build()
    names = ("fully_shard", "FSDPModule")
    with mock.patch.multiple(fsdp, **{name: getattr(api, name) for name in names}):
        spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=training,
            parallelism=parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
        )
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    for module in model.modules():
        if isinstance(module, stock.FSDPModule) and api is stock:
            # torchtitan divides by itself; stock multiplies while it reduces, which gloo cannot
            module.set_force_sum_reduction_for_comms(True)
    return model, dims
