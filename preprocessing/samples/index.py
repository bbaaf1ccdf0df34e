"""The index stage: which samples training reads, in which order, from one dataset or a blend.

Writes, per split (train, valid, test), the arrays of `sample_index.py`:

    one dataset   {split}_{document,sample,shuffle}_index.npy
    a blend       dataset{N}/{split}_{document,sample,shuffle}_index.npy for each dataset, and
                  {split}_dataset_index.npy, {split}_dataset_sample_index.npy

and `index.json`, which says for which datasets and with which numbers they were made.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contracts.artifact import Artifact
from contracts.errors import ConfigError, InputError
from contracts.files import user_path, write_atomically
from contracts.stage import Stage
from contracts.store import Workspace
from preprocessing.config import IndexConfig
from preprocessing.dataset.token_dataset import TokenDataset, artifact_content, pair_files
from preprocessing.reading.recorded import recorded_path
from preprocessing.samples.kernels import blend, blend_exhaustively
from preprocessing.samples.sample_index import SampleIndex, build_sample_index
from preprocessing.samples.splits import SPLITS, parse_split, split_range

INDEX_FILE = "index.json"
INDEX_FORMAT = 1

# Each dataset of a weighted blend is built for this much more than its share, so that rounding
# never asks for a sample that it lacks (Megatron-LM: mid_level_dataset_surplus).
SURPLUS = 0.005


@dataclass(frozen=True)
class _Split:
    """One split to be built: its name, its bounds of the datasets, and the samples asked for."""

    name: str
    bounds: tuple[float, float]
    num_samples: int | None


def index(settings: IndexConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Build the indices into `workspace.path`; return counts per split.

    Raises:
        ConfigError: Datasets, weights, split and samples do not fit together.
        InputError: A dataset is damaged, or too small to give one sample.
    """
    try:
        datasets = [TokenDataset(path) for path in _dataset_paths(settings, inputs)]
        summary = build_index(settings, datasets, workspace.path, note=workspace.progress.note)
    except (ConfigError, InputError):
        workspace.discard()
        raise
    return {**summary, "datasets": [recorded_path(dataset.path, workspace.store) for dataset in datasets]}


def build_index(
    settings: IndexConfig, datasets: Sequence[TokenDataset], folder: Path, *, note: Callable[[str], None]
) -> dict[str, Any]:
    """Build the indices of some datasets into `folder`; see `index`.

    Args:
        note: Told of what a user should know, such as repeated data or an empty split.
    """
    weights = settings.weights
    if weights is not None and len(weights) != len(datasets):
        raise ConfigError(f"index.weights has {len(weights)} weights for {len(datasets)} datasets. Give one for each.")
    warnings: list[str] = []
    splits: dict[str, Any] = {}
    for split in _splits(settings, datasets):
        if len(datasets) == 1:
            built = _build_part(split, datasets[0], settings, split.num_samples, warnings)
            splits[split.name] = _save(built, folder, split.name)
        else:
            splits[split.name] = _build_blend(split, datasets, settings, folder, warnings)
    if not splits:
        raise ConfigError(f"index.split {settings.split!r} gives no split any document, so there is nothing to index.")
    for text in warnings:
        note(text)
    description = {
        "format": INDEX_FORMAT,
        "seq_length": settings.seq_length,
        "seed": settings.seed,
        "split": settings.split,
        "weights": None if weights is None else list(weights),
        "datasets": [dataset.identity for dataset in datasets],
        "splits": splits,
    }
    write_atomically(folder / INDEX_FILE, json.dumps(description, indent=1) + "\n", is_durable=False)
    return {
        "seq_length": settings.seq_length,
        **{f"{name}_samples": numbers["samples"] for name, numbers in splits.items()},
        "splits": splits,
        "warnings": warnings,
    }


def _splits(settings: IndexConfig, datasets: Sequence[TokenDataset]) -> list[_Split]:
    """List the splits to build; those of no width, or of which 0 samples are asked, are left out."""
    shares = parse_split(settings.split)
    asked = (settings.samples, settings.valid_samples, settings.test_samples)
    is_weighted = settings.weights is not None and len(datasets) > 1
    found = []
    for name, bounds, num_samples in zip(SPLITS, shares, asked, strict=True):
        if bounds is None and num_samples and name != "train":
            raise ConfigError(
                f"index.{name}_samples is {num_samples}, but index.split {settings.split!r} leaves nothing for {name}."
            )
        if bounds is None or num_samples == 0:
            continue
        if num_samples is None and is_weighted:
            # A weighted blend has no natural end, so the other splits follow from the training samples.
            num_samples = _share_of_samples(name, bounds, shares[0], settings)
        found.append(_Split(name, bounds, num_samples))
    return found


def _share_of_samples(
    name: str, bounds: tuple[float, float], train: tuple[float, float] | None, settings: IndexConfig
) -> int:
    """Samples of a split of a weighted blend, in the proportion of its width to that of train."""
    if name == "train" or settings.samples is None or train is None:
        raise ConfigError(
            f"index.weights need index.{'' if name == 'train' else name + '_'}samples: a weighted blend has no natural "
            "end. Set it (--samples), or 0 for none."
        )
    return max(1, round(settings.samples * (bounds[1] - bounds[0]) / (train[1] - train[0])))


def _build_part(
    split: _Split, dataset: TokenDataset, settings: IndexConfig, num_samples: int | None, warnings: list[str]
) -> SampleIndex:
    """Build one split of one dataset; refuse or warn where it holds no document or no sample."""
    units = split_range(split.bounds, dataset.num_sequences)
    tokens = int(dataset.lengths[units.start : units.stop].sum(dtype=np.int64))
    where = f"{split.name} of {dataset.path}"
    has_asked = split.name == "train" or bool(num_samples)
    if tokens == 0:
        text = (
            f"{where} holds no token: the split {settings.split!r} gives it documents {units.start} up to {units.stop} "
            f"of {dataset.num_sequences}"
        )
        if has_asked:
            raise InputError(f"{text}. Give it a larger weight in index.split, or use more data.")
        warnings.append(text)
        num_samples = None
    built = build_sample_index(
        dataset.lengths, units, seq_length=settings.seq_length, num_samples=num_samples, seed=settings.seed
    )
    plan = built.plan
    numbers = (
        f"{where}: {plan.tokens_per_epoch} tokens give {plan.samples_per_epoch} samples of {settings.seq_length} "
        "tokens (and one label) an epoch"
    )
    if plan.num_samples == 0 and tokens:
        if has_asked:
            raise InputError(
                f"{numbers}. Use more data, a shorter index.seq_length, or set the number of samples to repeat it."
            )
        warnings.append(numbers)
    elif plan.num_epochs > 1:
        warnings.append(f"{numbers}; {plan.num_epochs} epochs give the {num_samples} asked for, so data repeat")
    return built


def _save(built: SampleIndex, folder: Path, prefix: str) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("document_index", "sample_index", "shuffle_index"):
        _save_array(folder / f"{prefix}_{name}.npy", getattr(built, name))
    plan = built.plan
    return {
        "samples": plan.num_samples,
        "epochs": plan.num_epochs,
        "tokens_per_epoch": plan.tokens_per_epoch,
        "samples_per_epoch": plan.samples_per_epoch,
        "separate_final_epoch": plan.has_separate_final_epoch,
    }


def _save_array(path: Path, array: Any) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        np.save(file, array)
    temporary.replace(path)


def _build_blend(
    split: _Split, datasets: Sequence[TokenDataset], settings: IndexConfig, folder: Path, warnings: list[str]
) -> dict[str, Any]:
    """Build one split of a blend: each dataset by itself, then which of them gives each sample."""
    used, weights, wanted = _shares(split, datasets, settings)
    parts: dict[str, Any] = {}
    for number, num_samples in zip(used, wanted, strict=True):
        asked = None if num_samples is None else math.ceil(num_samples * (1 + SURPLUS))
        built = _build_part(split, datasets[number], settings, asked, warnings)
        parts[f"dataset{number}"] = _save(built, folder / f"dataset{number}", split.name)
    sizes = np.array([part["samples"] for part in parts.values()], dtype=np.int64)
    if weights is None:
        weights = sizes / max(1, sizes.sum())
        if split.num_samples is None:
            chosen, sample = blend_exhaustively(sizes)
        else:
            chosen, sample = blend(weights, min(split.num_samples, int(sizes.sum())))
    else:
        chosen, sample = blend(weights, sum(count for count in wanted if count is not None))
    drawn = np.bincount(chosen, minlength=len(used))
    for position, (count, size) in enumerate(zip(drawn.tolist(), sizes.tolist(), strict=True)):
        if count > size:
            raise InputError(
                f"the blend draws {count} {split.name} samples of {datasets[used[position]].path}, which has {size}. "
                "Raise its weight, or ask for more samples."
            )
        parts[f"dataset{used[position]}"]["drawn"] = count
    _save_array(folder / f"{split.name}_dataset_index.npy", np.array(used, dtype=np.int16)[chosen])
    _save_array(folder / f"{split.name}_dataset_sample_index.npy", sample)
    return {"samples": len(chosen), "datasets": parts}


def _shares(
    split: _Split, datasets: Sequence[TokenDataset], settings: IndexConfig
) -> tuple[list[int], Any, list[int | None]]:
    """Return the datasets that are drawn from, their weights (sum 1), and the samples asked of each.

    A dataset of weight 0 is left out: it would win ties in the choice of the next dataset.
    """
    if settings.weights is None:
        return list(range(len(datasets))), None, [None] * len(datasets)
    used = [number for number, weight in enumerate(settings.weights) if weight > 0]
    total = sum(settings.weights[number] for number in used)
    weights = [settings.weights[number] / total for number in used]
    wanted: list[int | None] = [math.ceil((split.num_samples or 0) * weight) for weight in weights]
    normalised = np.array(weights, dtype=np.float64)
    return used, normalised / np.sum(normalised), wanted


def _dataset_paths(settings: IndexConfig, inputs: Mapping[str, Artifact]) -> list[Path]:
    names = sorted((name for name in inputs if name.startswith("dataset")), key=lambda name: int(name[7:] or 0))
    if names and settings.datasets:
        raise ConfigError("index: both dataset artifacts and index.datasets are given. Keep one.")
    paths = [inputs[name].path for name in names] or [user_path(path) for path in settings.datasets]
    if not paths:
        raise ConfigError("index: no dataset. Set index.datasets (--dataset DIR), or give dataset artifacts.")
    return paths


def _raw(settings: IndexConfig) -> dict[str, str]:
    """Name artifacts given by path by their content."""
    found = {f"dataset{number}": artifact_content(path) for number, path in enumerate(settings.datasets)}
    return {name: content for name, content in found.items() if content is not None}


def _raw_files(settings: IndexConfig) -> dict[str, Path]:
    """Name foreign pairs by their `.idx`: it alone decides the indices, and it is small."""
    return {
        f"dataset{number}/{file.name}": file
        for number, path in enumerate(settings.datasets)
        for file in pair_files(path).values()
        if file.suffix == ".idx"
    }


INDEX = Stage(
    name="index",
    version=1,
    kind="index",
    settings=IndexConfig,
    work=index,
    raw_files=_raw_files,
    raw=_raw,
)
