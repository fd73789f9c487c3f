"""A step without its communication, to see what the rest takes: FSDP1's switches, for both front
ends.

`FSDP_USE_FAKE_ALL_GATHER=1` and `FSDP_USE_FAKE_REDUCE=1`, set while a model is sharded, send what
would be gathered or reduced to a process group of torch's "fake" backend: the same graph, the same
kernels, and nothing on the wire. Losses mean nothing then.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from compiled_fsdp.errors import warn_once
from compiled_fsdp.torch_private.groups import group_named, kept_for, new_group

# By the name of a group, the group and its fake one.
_made: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def is_ablated(name: str) -> bool:
    """Whether a switch is on; says so once."""
    if os.environ.get(name) != "1":
        return False
    what = "gathered" if "GATHER" in name else "reduced"
    warn_once(
        f"compiled_fsdp: {name}=1: nothing is {what}, so training is wrong; the time of a step is "
        "without it"
    )
    return True


def fake_group(name: str) -> str:
    """The name of a fake group with the ranks of this one; made once, by all its ranks together."""
    group = group_named(name)

    def make() -> dist.ProcessGroup:
        return new_group(dist.get_process_group_ranks(group), "fake")

    return kept_for(group, name, _made, make).group_name
