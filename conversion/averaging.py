"""The mean of the weights of several checkpoints of one model, read piece by piece as if it were one checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from contracts.errors import ConfigError, ShardlineError
from contracts.files import user_path
from conversion.catalogue import Box, Catalogue, Checkpoint, TensorEntry
from conversion.config import ReshapeConfig
from conversion.reading import open_checkpoint


class AveragedCatalogue:
    """Means over catalogues that have the same tensors; sums are made in float64."""

    def __init__(self, sources: Sequence[Catalogue], names: Sequence[str]) -> None:
        self._sources = sources
        self._entries = {name: sources[0].entries[name] for name in names}

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    def read(self, name: str, box: Box) -> Tensor:
        total = self._sources[0].read(name, box).to(torch.float64)
        for source in self._sources[1:]:
            total += source.read(name, box).to(torch.float64)
        return (total / len(self._sources)).to(self._entries[name].dtype)

    def close(self) -> None:
        for source in self._sources:
            source.close()


def open_sources(path: Path, settings: ReshapeConfig) -> list[Checkpoint]:
    """Open what a reshape reads: the checkpoint, and those that it is averaged with.

    Raises:
        ConfigError, InputError: One cannot be opened.
    """
    opened = [open_checkpoint(path, settings.step)]
    try:
        opened += [open_checkpoint(user_path(item)) for item in settings.average]
    except ShardlineError:
        close_all(opened)
        raise
    return opened


def close_all(opened: Sequence[Checkpoint]) -> None:
    for item in opened:
        item.tensors.close()


def averaged(first: Checkpoint, others: Sequence[Checkpoint]) -> Checkpoint:
    """Return the mean of the weights of `first` and `others`; step and position are those of `first`.

    Without others it is `first` itself.

    Raises:
        ConfigError: One is of another model.
    """
    for other in others:
        if dict(other.info.model) != dict(first.info.model):
            names = [key for key, value in first.info.model.items() if other.info.model.get(key) != value]
            raise ConfigError(f"{other.path} is of another model than {first.path}: its {names[0]} differs.")
    if not others:
        return first
    names = list(first.info.parameters)
    steps = ", ".join(str(item.info.step) for item in (first, *others))
    note = (
        f"weights are the mean of {1 + len(others)} checkpoints (steps {steps}); there is no optimizer state of a mean"
    )
    tensors = AveragedCatalogue([item.tensors for item in (first, *others)], names)
    info = replace(first.info, has_optimizer=False, files={})
    return Checkpoint(first.path, first.format, info, tensors, (*first.notes, note))
