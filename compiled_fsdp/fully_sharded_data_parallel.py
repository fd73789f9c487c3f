"""Names that scripts import from `torch.distributed.fsdp.fully_sharded_data_parallel`, under the
same name here.
"""

from torch.distributed.fsdp import BackwardPrefetch as BackwardPrefetch
from torch.distributed.fsdp import CPUOffload as CPUOffload
from torch.distributed.fsdp import FullOptimStateDictConfig as FullOptimStateDictConfig
from torch.distributed.fsdp import FullStateDictConfig as FullStateDictConfig
from torch.distributed.fsdp import LocalOptimStateDictConfig as LocalOptimStateDictConfig
from torch.distributed.fsdp import LocalStateDictConfig as LocalStateDictConfig
from torch.distributed.fsdp import MixedPrecision as MixedPrecision
from torch.distributed.fsdp import OptimStateDictConfig as OptimStateDictConfig
from torch.distributed.fsdp import OptimStateKeyType as OptimStateKeyType
from torch.distributed.fsdp import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
from torch.distributed.fsdp import ShardedStateDictConfig as ShardedStateDictConfig
from torch.distributed.fsdp import ShardingStrategy as ShardingStrategy
from torch.distributed.fsdp import StateDictConfig as StateDictConfig
from torch.distributed.fsdp import StateDictSettings as StateDictSettings
from torch.distributed.fsdp import StateDictType as StateDictType

from compiled_fsdp.fsdp1.wrapper import FullyShardedDataParallel as FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel", "OptimStateKeyType"]
