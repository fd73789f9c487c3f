"""Fully sharded data parallelism as a compiler: `torch.compile(fully_shard(model))` is one
graph.
"""

import torch.distributed.fsdp
from torch.distributed.fsdp import BackwardPrefetch as BackwardPrefetch
from torch.distributed.fsdp import CPUOffload as CPUOffload
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import FlatParameter as FlatParameter
from torch.distributed.fsdp import FullOptimStateDictConfig as FullOptimStateDictConfig
from torch.distributed.fsdp import FullStateDictConfig as FullStateDictConfig
from torch.distributed.fsdp import LocalOptimStateDictConfig as LocalOptimStateDictConfig
from torch.distributed.fsdp import LocalStateDictConfig as LocalStateDictConfig
from torch.distributed.fsdp import MixedPrecision as MixedPrecision
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy
from torch.distributed.fsdp import OptimStateDictConfig as OptimStateDictConfig
from torch.distributed.fsdp import OptimStateKeyType as OptimStateKeyType
from torch.distributed.fsdp import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
from torch.distributed.fsdp import ShardedStateDictConfig as ShardedStateDictConfig
from torch.distributed.fsdp import ShardingStrategy as ShardingStrategy
from torch.distributed.fsdp import StateDictConfig as StateDictConfig
from torch.distributed.fsdp import StateDictSettings as StateDictSettings
from torch.distributed.fsdp import StateDictType as StateDictType

from compiled_fsdp.ahead.api import load_precompiled as load_precompiled
from compiled_fsdp.ahead.api import precompile as precompile
from compiled_fsdp.ahead.target import PrecompiledError as PrecompiledError
from compiled_fsdp.ahead.target import Target as Target
from compiled_fsdp.command.replacement import replace_stock as replace_stock
from compiled_fsdp.dump.writer import dumped_to as dumped_to
from compiled_fsdp.eager.finalization import GradientReductionHandle as GradientReductionHandle
from compiled_fsdp.frontend.chunks import in_chunks as in_chunks
from compiled_fsdp.frontend.compile_step import compile_step as compile_step
from compiled_fsdp.frontend.explain import UnusedOptionError as UnusedOptionError
from compiled_fsdp.frontend.explain import explain as explain
from compiled_fsdp.frontend.fallback import FallbackError as FallbackError
from compiled_fsdp.frontend.fallback import set_fallback as set_fallback
from compiled_fsdp.frontend.kernel_times import measure_kernels as measure_kernels
from compiled_fsdp.frontend.overlap import overlap_optimizer as overlap_optimizer
from compiled_fsdp.frontend.scalars import log_scalars as log_scalars
from compiled_fsdp.frontend.step import Step as Step
from compiled_fsdp.frontend.warmup import warmup as warmup
from compiled_fsdp.fsdp1.wrapper import FullyShardedDataParallel as FullyShardedDataParallel
from compiled_fsdp.fsdp2.api import fully_shard as fully_shard
from compiled_fsdp.fsdp2.fsdp_module import FSDPModule as FSDPModule
from compiled_fsdp.fsdp2.fsdp_module import UnshardHandle as UnshardHandle
from compiled_fsdp.fsdp2.fsdp_module import (
    register_fsdp_forward_method as register_fsdp_forward_method,
)
from compiled_fsdp.fsdp2.fsdp_module import share_comm_ctx as share_comm_ctx
from compiled_fsdp.inspection.explanation import Explanation as Explanation
from compiled_fsdp.optim.muon import Muon as Muon
from compiled_fsdp.optim.whole import update_whole as update_whole
from compiled_fsdp.passes.pipeline import pipeline as pipeline
from compiled_fsdp.passes.pipeline import print_graph as print_graph
from compiled_fsdp.planning.costs import Costs as Costs
from compiled_fsdp.planning.costs import Link as Link
from compiled_fsdp.planning.plan import Plan as Plan
from compiled_fsdp.planning.plan import current_plan as current_plan
from compiled_fsdp.planning.plan import planned as planned
from compiled_fsdp.planning.plan import set_plan as set_plan
from compiled_fsdp.units.precision import MixedPrecisionPolicy as MixedPrecisionPolicy
from compiled_fsdp.verification.invariant import GraphInvariantError as GraphInvariantError
from compiled_fsdp.wire.checks import ChecksumError as ChecksumError
from compiled_fsdp.wire.divergence import CommunicationError as CommunicationError
from compiled_fsdp.wire.divergence import DivergenceError as DivergenceError

from . import sharded_grad_scaler as sharded_grad_scaler
from . import wrap as wrap
from .compiler import backend as backend
from .version import __version__ as __version__

if hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):  # since torch 2.13
    from torch.distributed.fsdp import DataParallelMeshDims as DataParallelMeshDims

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "ChecksumError",
    "CommunicationError",
    "Costs",
    "DivergenceError",
    "Explanation",
    "FSDPModule",
    "FallbackError",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "GraphInvariantError",
    "Link",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "Muon",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "Plan",
    "PrecompiledError",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "Step",
    "Target",
    "UnshardHandle",
    "UnusedOptionError",
    "__version__",
    "compile_step",
    "current_plan",
    "dumped_to",
    "explain",
    "fully_shard",
    "in_chunks",
    "load_precompiled",
    "log_scalars",
    "measure_kernels",
    "overlap_optimizer",
    "pipeline",
    "planned",
    "precompile",
    "print_graph",
    "register_fsdp_forward_method",
    "replace_stock",
    "set_fallback",
    "set_plan",
    "share_comm_ctx",
    "update_whole",
    "warmup",
]
