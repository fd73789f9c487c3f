"""Bytes alive at each node of a finished graph, as objects; see `planning/memory.py`."""

from compiled_fsdp.planning.lifetimes import ACTIVATION as ACTIVATION
from compiled_fsdp.planning.lifetimes import BUCKET as BUCKET
from compiled_fsdp.planning.lifetimes import GATHERED as GATHERED
from compiled_fsdp.planning.lifetimes import GRADIENT as GRADIENT
from compiled_fsdp.planning.lifetimes import IN_FLIGHT as IN_FLIGHT
from compiled_fsdp.planning.lifetimes import OUTPUT as OUTPUT
from compiled_fsdp.planning.lifetimes import TEMPORARY as TEMPORARY
from compiled_fsdp.planning.lifetimes import Curve as Curve
from compiled_fsdp.planning.lifetimes import Lifetimes as Lifetimes
from compiled_fsdp.planning.lifetimes import Storage as Storage
from compiled_fsdp.planning.memory import Alive as Alive
from compiled_fsdp.planning.memory import MemoryProfile as MemoryProfile
from compiled_fsdp.planning.memory import StepProfile as StepProfile
from compiled_fsdp.planning.memory import profile as profile
from compiled_fsdp.planning.memory import profile_of as profile_of
from compiled_fsdp.planning.memory import profile_step as profile_step

__all__ = [
    "ACTIVATION",
    "BUCKET",
    "GATHERED",
    "GRADIENT",
    "IN_FLIGHT",
    "OUTPUT",
    "TEMPORARY",
    "Alive",
    "Curve",
    "Lifetimes",
    "MemoryProfile",
    "StepProfile",
    "Storage",
    "profile",
    "profile_of",
    "profile_step",
]
