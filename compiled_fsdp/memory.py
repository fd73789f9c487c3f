"""Bytes alive at each node of a finished graph, as objects; see `planning/memory.py`."""

from compiled_fsdp.planning.memory import Alive as Alive
from compiled_fsdp.planning.memory import MemoryProfile as MemoryProfile
from compiled_fsdp.planning.memory import StepProfile as StepProfile
from compiled_fsdp.planning.memory import profile as profile
from compiled_fsdp.planning.memory import profile_of as profile_of
from compiled_fsdp.planning.memory import profile_step as profile_step

__all__ = ["Alive", "MemoryProfile", "StepProfile", "profile", "profile_of", "profile_step"]
