"""The parts of stock FSDP1 that our wrapper uses: how a flat parameter is made, kept, saved and
loaded.

Private torch used here (tried on 2.13): the helpers of stock's constructor, state dicts and
handles, all imported below.

Stock's `FlatParamHandle` lays out the flat parameter (alignment, padding, shards, names), shows the
original parameters as views of it, and writes back what users put in their place. Stock's functions
for state dicts and optimizer state work on that, at rest. Nothing of stock's runtime is used: what
gathers, computes and reduces in forward and backward is this project's.
"""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from torch.distributed.algorithms._comm_hooks import default_hooks as default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel as StockFSDP
from torch.distributed.fsdp._common_utils import HandleTrainingState as HandleTrainingState
from torch.distributed.fsdp._common_utils import TrainingState as TrainingState
from torch.distributed.fsdp._common_utils import _log_post_backward_hook as log_post_backward
from torch.distributed.fsdp._common_utils import clean_tensor_name as clean_tensor_name
from torch.distributed.fsdp._dynamo_utils import _annotate_modules_for_dynamo as annotate_modules
from torch.distributed.fsdp._flat_param import FlatParameter as FlatParameter
from torch.distributed.fsdp._flat_param import FlatParamHandle as FlatParamHandle
from torch.distributed.fsdp._init_utils import (
    HYBRID_SHARDING_STRATEGIES as HYBRID_SHARDING_STRATEGIES,
)
from torch.distributed.fsdp._init_utils import _check_orig_params_flattened as check_all_flattened
from torch.distributed.fsdp._init_utils import _init_buffer_state as init_buffer_state
from torch.distributed.fsdp._init_utils import _init_core_state as init_core_state
from torch.distributed.fsdp._init_utils import _init_device_handle as init_device_handle
from torch.distributed.fsdp._init_utils import _init_extension as init_extension
from torch.distributed.fsdp._init_utils import _init_ignored_module_states as init_ignored
from torch.distributed.fsdp._init_utils import _init_param_handle_from_module as init_param_handle
from torch.distributed.fsdp._init_utils import _init_prefetching_state as init_prefetching
from torch.distributed.fsdp._init_utils import _init_process_group_state as init_process_groups
from torch.distributed.fsdp._init_utils import _init_runtime_state as init_runtime_state
from torch.distributed.fsdp._init_utils import _init_state_dict_state as init_state_dict_state
from torch.distributed.fsdp._runtime_utils import _cast_buffers_to_dtype_and_device as cast_buffers
from torch.distributed.fsdp._runtime_utils import (
    _get_buffers_and_dtypes_for_computation as buffers_for_computation,
)
from torch.distributed.fsdp._runtime_utils import _lazy_init as lazy_init
from torch.distributed.fsdp._state_dict_utils import (
    _register_all_state_dict_hooks as register_state_dict_hooks,
)
from torch.distributed.fsdp._unshard_param_utils import _register_flat_param as register_flat_param
from torch.distributed.fsdp._wrap_utils import _auto_wrap as auto_wrap

__all__ = [
    "HYBRID_SHARDING_STRATEGIES",
    "FlatParamHandle",
    "FlatParameter",
    "HandleTrainingState",
    "StockFSDP",
    "TrainingState",
    "annotate_modules",
    "auto_wrap",
    "buffers_for_computation",
    "cast_buffers",
    "check_all_flattened",
    "clean_tensor_name",
    "default_hooks",
    "init_buffer_state",
    "init_core_state",
    "init_device_handle",
    "init_extension",
    "init_ignored",
    "init_param_handle",
    "init_prefetching",
    "init_process_groups",
    "init_runtime_state",
    "init_state_dict_state",
    "lazy_init",
    "log_post_backward",
    "register_flat_param",
    "register_state_dict_hooks",
]
