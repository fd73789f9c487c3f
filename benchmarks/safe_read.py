"""Reads a sharded checkpoint without running what may stand in its files.

torch.distributed.checkpoint reads tensors with `weights_only=True`, but unpickles its `.metadata`,
and everything that is no tensor, freely (torch 2.13). Here the first takes only the classes that a
checkpoint's table of contents is made of, and the second only what `weights_only=True` takes.

Private torch used here (tried on 2.13): `FileSystemReader._get_metadata_path`.
"""

from __future__ import annotations

import pickle
from enum import Enum, EnumMeta
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

ALLOWED = {
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


def member_of(enumeration: object, name: object) -> Enum:
    """In place of `getattr`, by which Python up to 3.11.3 pickles the members of an `Enum`."""
    if isinstance(enumeration, EnumMeta) and isinstance(name, str):
        found = enumeration.__members__.get(name)
        if isinstance(found, Enum):
            return found
    raise pickle.UnpicklingError(
        f"{name!r} of {enumeration!r} does not belong in the metadata of a checkpoint"
    )


class MetadataUnpickler(pickle.Unpickler):
    """Makes only objects of the `ALLOWED` classes, members of those that are enumerations, and
    dtypes.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Raise for any other class or function."""
        if (module, name) == ("builtins", "getattr"):
            return member_of
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(
                f"{module}.{name} does not belong in the metadata of a checkpoint"
            )
        return super().find_class(module, name)


class Reader(FileSystemReader):
    """Reads the files of a checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the table of contents."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"the metadata of a checkpoint is of {type(metadata)}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(DefaultLoadPlanner):
    """Takes over what was read."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Take what is no tensor: numbers, text, lists and dicts of them."""
        torch.load(
            value, weights_only=True
        )  # raises for what the base class, which reads freely, should not see
        value.seek(0)
        super().load_bytes(read_item, value)
