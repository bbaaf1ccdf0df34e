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
from preprocessing.dataset.token_dataset import (
    TokenDataset,
    artifact_contents,
    pair_files,
    refuse_mixed_tokenizers,
)
from preprocessing.reading.recorded import recorded_path
from preprocessing.samples.bert_index import build_sentence_part
from preprocessing.samples.conversation_index import build_conversation_part
from preprocessing.samples.index_files import INDEX_FILE, INDEX_FORMAT
from preprocessing.samples.kernels import WeightedPhase, blend, blend_exhaustively, blend_phases
from preprocessing.samples.parts import Asked, Part, find_parts
from preprocessing.samples.sample_index import plan_units, save_array, save_sample_index
from preprocessing.samples.special_tokens import bert_tokens, fim_tokens
from preprocessing.samples.splits import SPLITS, parse_split
from preprocessing.samples.t5_lengths import check_sentinels, lengths_for_encoder

# Each dataset of a weighted blend is built for this much more than its share, so that rounding
# never asks for a sample that it lacks (Megatron-LM: mid_level_dataset_surplus).
SURPLUS = 0.005
MAX_ENTRIES = 2**34  # 64 to 128 GB of memory for one array


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
    refuse_mixed_tokenizers(datasets)
    _check_objective(settings, datasets)
    parts = find_parts(datasets, settings.subsets)
    for name in ("weights", "epochs", "tokens"):
        numbers = getattr(settings, name)
        if numbers is not None and len(numbers) != len(parts):
            what = "subsets" if settings.subsets else "datasets"
            raise ConfigError(f"index.{name} has {len(numbers)} {name} for {len(parts)} {what}. Give one for each.")
    if settings.phases and len(settings.phases[0].weights) != len(parts):
        raise ConfigError(
            f"a phase of index.phases has {len(settings.phases[0].weights)} weights for {len(parts)} "
            "datasets or subsets. Give one for each."
        )
    warnings: list[str] = []
    splits: dict[str, Any] = {}
    for split in _splits(settings, len(parts)):
        if len(parts) == 1 and not settings.is_counted:  # phases of one dataset read it in its order
            splits[split.name] = _build_part(split, parts[0], settings, split.num_samples, folder, warnings)
        else:
            splits[split.name] = _build_blend(split, parts, settings, folder, warnings)
    if not splits:
        raise ConfigError(f"index.split {settings.split!r} gives no split any document, so there is nothing to index.")
    for text in warnings:
        note(text)
    description = {
        "format": INDEX_FORMAT,
        "seq_length": settings.seq_length,
        "seed": settings.seed,
        "split": settings.split,
        "weights": None if settings.weights is None else list(settings.weights),
        "datasets": [dataset.identity for dataset in datasets],
        **_objective_of(settings),
        **({"phases": [phase.model_dump(mode="json") for phase in settings.phases]} if settings.phases else {}),
        **({"parts": [{"dataset": part.dataset, "subset": part.subset} for part in parts]} if settings.subsets else {}),
        "splits": splits,
    }
    write_atomically(folder / INDEX_FILE, json.dumps(description, indent=1) + "\n", is_durable=False)
    return {
        "seq_length": settings.seq_length,
        **{f"{name}_samples": numbers["samples"] for name, numbers in splits.items()},
        "splits": splits,
        "warnings": warnings,
    }


def _check_objective(settings: IndexConfig, datasets: Sequence[TokenDataset]) -> None:
    """Make sure, before anything is built, that the tokenizer has the tokens of the objective.

    Raises:
        ConfigError: It lacks one, or the first dataset keeps no tokenizer.
    """
    if settings.objective in ("causal", "sft"):
        return
    tokenizer = datasets[0].tokenizer
    if settings.objective == "fim":
        fim_tokens(tokenizer)
    elif settings.objective == "bert":
        bert_tokens(tokenizer)
    else:
        check_sentinels(tokenizer, lengths_for_encoder(settings.seq_length, settings.t5))


def _objective_of(settings: IndexConfig) -> dict[str, Any]:
    """Describe the objective for `index.json`; nothing for plain causal samples."""
    if settings.objective == "causal":
        return {}
    stride, shared = _window(settings)
    rows = {"row_tokens": stride} if not shared else {}
    own = {"fim": settings.fim, "bert": settings.bert, "t5": settings.t5, "sft": settings.sft}[settings.objective]
    return {"objective": {"kind": settings.objective, "settings": own.model_dump(mode="json")}, **rows}


def _window(settings: IndexConfig) -> tuple[int, int]:
    """Return how far apart samples begin, and how many tokens neighbours share."""
    if settings.objective == "t5":
        return lengths_for_encoder(settings.seq_length, settings.t5).window, 0
    if settings.objective == "bert":
        return settings.seq_length - 2, 0  # [CLS] and [SEP]
    return settings.seq_length, 1


def _splits(settings: IndexConfig, num_parts: int) -> list[_Split]:
    """List the splits to build; those of no width, or of which 0 samples are asked, are left out."""
    shares = parse_split(settings.split)
    samples = sum(phase.samples for phase in settings.phases) if settings.phases else settings.samples
    asked = (samples, settings.valid_samples, settings.test_samples)
    is_weighted = settings.weights is not None and num_parts > 1
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
    split: _Split, part: Part, settings: IndexConfig, asked: Asked, folder: Path, warnings: list[str]
) -> dict[str, Any]:
    """Build one split of one part; refuse or warn where it holds no document or no sample.

    Args:
        asked: Samples to build, or a function that tells them by the samples of one epoch; None for one epoch.
    """
    if settings.objective == "bert" and settings.bert.pairs != "none":
        return build_sentence_part(split.name, split.bounds, part, settings, asked, folder, warnings)
    if settings.objective == "sft":
        return build_conversation_part(split.name, split.bounds, part, settings, asked, folder, warnings)
    lengths = part.tokens.lengths
    stride, shared = _window(settings)
    units = part.units(split.bounds, by=settings.split_by, seed=settings.seed)
    plan = plan_units(lengths, units, stride, None, extra_tokens=shared)
    num_samples = asked(plan.samples_per_epoch) if callable(asked) else asked
    where = f"{split.name} of {part.name}"
    has_asked = split.name == "train" or bool(num_samples)
    if plan.tokens_per_epoch == 0:
        which = f"documents {units.start} up to {units.stop}" if isinstance(units, range) else f"{len(units)} documents"
        text = f"{where} holds no token: the split {settings.split!r} gives it {which} of {part.tokens.num_sequences}"
        if has_asked:
            raise InputError(f"{text}. Give it a larger weight in index.split, or use more data.")
        warnings.append(text)
        num_samples = None
    if num_samples is not None:
        plan = plan_units(lengths, units, stride, num_samples, extra_tokens=shared)
    numbers = (
        f"{where}: {plan.tokens_per_epoch} tokens give {plan.samples_per_epoch} samples of {stride} "
        f"tokens{' (and one label)' if shared else ''} an epoch"
    )
    if plan.num_samples == 0 and plan.tokens_per_epoch:
        if has_asked:
            raise InputError(
                f"{numbers}. Use more data, a shorter index.seq_length, or set the number of samples to repeat it."
            )
        warnings.append(numbers)
    elif plan.num_epochs > 1:
        warnings.append(f"{numbers}; {plan.num_epochs} epochs give the {num_samples} asked for, so data repeat")
    entries = max(plan.num_samples, plan.num_epochs * len(units))
    if entries > MAX_ENTRIES:
        raise ConfigError(
            f"{where}: {num_samples} samples, of {plan.num_epochs} epochs, would make an index of {entries:.3g} "
            f"entries in memory; {MAX_ENTRIES:.3g} is the most. Ask for fewer samples, epochs or tokens."
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_sample_index(lengths, units, plan, seed=settings.seed, folder=folder, prefix=split.name)
    return {
        "samples": plan.num_samples,
        "epochs": plan.num_epochs,
        "tokens_per_epoch": plan.tokens_per_epoch,
        "samples_per_epoch": plan.samples_per_epoch,
        "separate_final_epoch": plan.has_separate_final_epoch,
        **({"asked": num_samples} if callable(asked) else {}),
    }


def _build_blend(
    split: _Split, parts: Sequence[Part], settings: IndexConfig, folder: Path, warnings: list[str]
) -> dict[str, Any]:
    """Build one split of a blend: each part by itself, then which of them gives each sample."""
    used, phases, wanted = _shares(split, parts, settings)
    built: dict[str, Any] = {}
    for number, asked in zip(used, wanted, strict=True):
        more = math.ceil(asked * (1 + SURPLUS)) if isinstance(asked, int) else asked
        where = folder / f"dataset{number}"
        built[f"dataset{number}"] = _build_part(split, parts[number], settings, more, where, warnings)
    sizes = np.array([numbers["samples"] for numbers in built.values()], dtype=np.int64)
    if phases:
        chosen, sample = blend_phases(phases, len(used))
    elif settings.is_counted and split.name == "train":
        chosen, sample = blend_exhaustively(np.array([numbers["asked"] for numbers in built.values()], dtype=np.int64))
    elif split.num_samples is None:
        chosen, sample = blend_exhaustively(sizes)
    else:
        chosen, sample = blend(sizes / max(1, sizes.sum()), min(split.num_samples, int(sizes.sum())))
    drawn = np.bincount(chosen, minlength=len(used))
    for position, (count, size) in enumerate(zip(drawn.tolist(), sizes.tolist(), strict=True)):
        if count > size:
            raise InputError(
                f"the blend draws {count} {split.name} samples of {parts[used[position]].name}, which has {size}. "
                "Raise its weight, or ask for more samples."
            )
        built[f"dataset{used[position]}"]["drawn"] = count
    numbers = np.array(used, dtype=np.int16)[chosen]
    save_array(folder / f"{split.name}_dataset_index.npy", [numbers], numbers.shape)
    save_array(folder / f"{split.name}_dataset_sample_index.npy", [sample], sample.shape)
    return {"samples": len(chosen), "datasets": built}


def _shares(
    split: _Split, parts: Sequence[Part], settings: IndexConfig
) -> tuple[list[int], list[WeightedPhase], Sequence[Asked]]:
    """Return the parts that are drawn from, the phases of a weighted blend, and the samples asked of each part.

    A part of weight 0 is left out: it would win ties in the choice of the next part.
    """
    if settings.phases and split.name == "train":
        matrix = np.array([phase.weights for phase in settings.phases], dtype=np.float64)
        used = np.flatnonzero(matrix.any(axis=0)).tolist()
        shares = matrix[:, used] / matrix.sum(axis=1, keepdims=True)
        phases = [(phase.samples, share) for phase, share in zip(settings.phases, shares, strict=True)]
        # Every phase may draw one sample more of a part than its share.
        surplus = len(phases) if len(phases) > 1 else 0
        wanted = [math.ceil(sum(size * share[n] for size, share in phases)) + surplus for n in range(len(used))]
        return used, phases, wanted
    numbers = settings.weights or settings.epochs or settings.tokens or (1.0,) * len(parts)
    used = [number for number, weight in enumerate(numbers) if weight > 0]
    if settings.weights is None:
        return used, [], [_asked_of(number, split, settings) for number in used]
    total = sum(settings.weights[number] for number in used)
    weights = [settings.weights[number] / total for number in used]
    wanted = [math.ceil((split.num_samples or 0) * weight) for weight in weights]
    normalised = np.array(weights, dtype=np.float64)
    return used, [(sum(wanted), normalised / np.sum(normalised))], wanted


def _asked_of(number: int, split: _Split, settings: IndexConfig) -> Asked:
    """Training samples of a part that is counted in epochs or tokens; the other splits are read once."""
    if split.name != "train" or not settings.is_counted:
        return None
    if settings.epochs is not None:
        epochs = settings.epochs[number]
        return lambda samples_per_epoch: max(1, round(epochs * samples_per_epoch))
    tokens = (settings.tokens or ())[number]
    return lambda samples_per_epoch: max(1, tokens // settings.seq_length)


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
    return artifact_contents(settings.datasets)


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
