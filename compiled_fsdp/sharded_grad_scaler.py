"""`ShardedGradScaler`: torch's own; it works on gradients and a process group, whoever reduced
them.
"""

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as ShardedGradScaler

__all__ = ["ShardedGradScaler"]
