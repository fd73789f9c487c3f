"""Wrapping policies for `FullyShardedDataParallel`, and `wrap`: torch's own, which know no wrapper
class.
"""

from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as ModuleWrapPolicy
from torch.distributed.fsdp.wrap import always_wrap_policy as always_wrap_policy
from torch.distributed.fsdp.wrap import enable_wrap as enable_wrap
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy as lambda_auto_wrap_policy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy as size_based_auto_wrap_policy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy as transformer_auto_wrap_policy
from torch.distributed.fsdp.wrap import wrap as wrap

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
