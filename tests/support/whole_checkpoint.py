"""Reads a native checkpoint uncut into this process."""

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from training.checkpoint import SafeReader
from training.safe_pickle import read_dcp_metadata


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """Stored name to whole tensor, of a step folder."""
    stored = read_dcp_metadata(folder).state_dict_metadata
    tensors = {
        name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        load(tensors, storage_reader=SafeReader(folder), no_dist=True)
    return tensors
