"""Looks into checkpoints: what is in one, whether it is sound, what differs between two."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contracts.errors import InputError, ShardlineError
from conversion.catalogue import Box, Checkpoint, TensorEntry, equal_bits, num_elements, row_blocks
from conversion.dcp import describe_dcp
from conversion.detect import NAMES, READABLE, format_of
from conversion.megatron import check_megatron_files
from conversion.native import check_record_sums
from conversion.rank_shards import degrees
from conversion.reading import model_of, open_checkpoint
from training.file_digests import differing_digest
from training.parameters import OPTIMIZER_PREFIX
from training.step_folders import find_latest, list_checkpoints


def inspect_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds: format, steps, layout, sizes, and a table of its parameters.

    Every weight is read once, for its largest magnitude and root mean square. A format that cannot
    be read gets its name and its steps; a damaged checkpoint gets its `problem`.
    """
    kind = format_of(path)
    result: dict[str, Any] = {"format": kind, "format_name": NAMES.get(kind or "", "no checkpoint")}
    steps = list_checkpoints(path)
    if steps:
        result["steps"] = [
            {
                "step": item.step,
                "folder": item.path.name,
                "state": f"incomplete: {item.problem}" if item.problem else "whole",
            }
            for item in steps
        ]
        result |= _newest(path)
    if kind not in READABLE:
        return result
    try:
        checkpoint = open_checkpoint(path)
    except ShardlineError as error:
        return {**result, **(describe_dcp(path) if kind == "dcp" else {}), "problem": str(error)}
    try:
        return result | _facts(checkpoint)
    finally:
        checkpoint.tensors.close()


def _newest(path: Path) -> dict[str, Any]:
    try:
        latest, warnings = find_latest(path)
    except InputError as error:
        return {"newest_whole_step": None, "warnings": [str(error)]}
    return {"newest_whole_step": latest.step if latest else None, "warnings": warnings}


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    info, entries = checkpoint.info, checkpoint.tensors.entries
    rows, suspicious = _table(checkpoint)
    weights = {name: entries[name] for name in info.parameters}
    dtypes = Counter(str(entry.dtype).removeprefix("torch.") for entry in weights.values())
    return {
        "step": info.step,
        "consumed_samples": info.consumed_samples,
        "consumed_tokens": info.consumed_tokens,
        "seq_length": info.seq_length,
        "layout": {key: value for key, value in info.layout.items() if key.endswith("_parallel")},
        "model": dict(info.model),
        "parameters": sum(num_elements(entry.shape) for entry in weights.values()),
        "bytes": sum(entry.size_bytes for entry in entries.values()),
        "dtypes": dict(dtypes),
        "has_optimizer": info.has_optimizer,
        "notes": list(checkpoint.notes),
        "suspicious": suspicious,
        "extra": dict(info.extra),
        **({"stored": dict(checkpoint.facts)} if checkpoint.facts else {}),
        "table": rows,
    }


def _table(checkpoint: Checkpoint) -> tuple[list[dict[str, Any]], list[str]]:
    rows, suspicious = [], []
    for name in checkpoint.info.parameters:
        entry = checkpoint.tensors.entries[name]
        not_finite, squares, largest = 0, 0.0, 0.0
        for block in _blocks(checkpoint, entry):
            values = block.double()
            is_finite = torch.isfinite(values)
            not_finite += int(values.numel() - is_finite.sum())
            values = torch.where(is_finite, values, 0.0)
            squares += float(values.square().sum())
            largest = max(largest, float(values.abs().max()) if values.numel() else 0.0)
        count = num_elements(entry.shape)
        if not_finite:
            suspicious.append(f"{name}: {not_finite} of {count} values are NaN or infinite")
        elif largest == 0.0 and not name.endswith(".bias"):
            suspicious.append(f"{name}: all values are zero")
        rows.append(
            {
                "name": name,
                "shape": "x".join(map(str, entry.shape)),
                "dtype": str(entry.dtype).removeprefix("torch."),
                "rms": f"{math.sqrt(squares / max(1, count)):.4g}",
                "largest": f"{largest:.4g}",
            }
        )
    return rows, suspicious


def _blocks(checkpoint: Checkpoint, entry: TensorEntry) -> Iterator[Tensor]:
    for box in row_blocks(entry.box, entry.dtype.itemsize):
        yield checkpoint.tensors.read(entry.name, box)


def verify_checkpoint(path: Path) -> list[str]:
    """Re-read all of a checkpoint; return one line for each thing that is wrong.

    Native: every step, its files against the digests in their manifest, and each tensor of the
    newest whole step. Hugging Face: headers, names, shapes, tied copies, every value.
    """
    kind = format_of(path)
    if kind is None:
        return [f"{path}: holds no checkpoint"]
    listed = list_checkpoints(path, digests=True)
    problems = [f"{item.path}: {item.problem}" for item in listed if item.problem is not None]
    if kind not in READABLE:
        return problems or [f"{path}: is a {NAMES[kind]}, whose tensors cannot be checked yet"]
    try:
        checkpoint = open_checkpoint(path)
    except ShardlineError as error:
        return list(dict.fromkeys([*problems, str(error)]))
    try:
        damaged = [] if listed and kind == "native" else damaged_files(checkpoint)
        return problems + damaged + _problems(checkpoint)
    finally:
        checkpoint.tensors.close()


def _problems(checkpoint: Checkpoint) -> list[str]:
    problems = []
    for name, entry in checkpoint.tensors.entries.items():
        not_finite = 0
        try:
            for block in _blocks(checkpoint, entry):
                not_finite += int(block.numel() - torch.isfinite(block).sum())
        except InputError as error:
            problems.append(str(error))
        if not_finite:
            problems.append(f"{checkpoint.path}: tensor {name} has {not_finite} values that are NaN or infinite")
    return problems


def damaged_files(checkpoint: Checkpoint) -> list[str]:
    """Files of a step folder given by itself; folders of several steps are checked by their list."""
    if checkpoint.format in ("megatron", "mcore_dist", "dcp"):
        try:
            if checkpoint.format == "megatron":
                check_megatron_files(checkpoint.path)
            elif (checkpoint.path / ".metadata").is_file():
                check_record_sums(checkpoint.path)
        except InputError as error:
            return [str(error)]
    return [
        f"{checkpoint.path / name}: its {digest} differs from the one in the manifest"
        for name, facts in checkpoint.info.files.items()
        if (digest := differing_digest(checkpoint.path / name, facts)) is not None
    ]


def compare_checkpoints(a: Path, b: Path) -> dict[str, Any]:
    """Compare the tensors of two checkpoints under canonical names, whatever their formats and layouts.

    Padding rows of the vocabulary are left out where a side has none or another number of them.

    Returns:
        Counts, `only_in_a`, `only_in_b`, and `different`: name to shapes or the largest absolute difference.
    """
    first = open_checkpoint(a)
    try:
        second = open_checkpoint(b)
        try:
            return _differences(first, second)
        finally:
            second.tensors.close()
    finally:
        first.tensors.close()


def _differences(first: Checkpoint, second: Checkpoint) -> dict[str, Any]:
    ours, theirs = first.tensors.entries, second.tensors.entries
    vocab = min(model_of(c.info, c.path).vocab_size or 0 for c in (first, second))
    keep_padding = first.format == second.format == "native"
    different: dict[str, str] = {}
    equal = 0
    for name in (name for name in ours if name in theirs):
        box = _common_rows(ours[name], theirs[name], vocab, keep_padding=keep_padding)
        if box is None:
            different[name] = f"shapes {list(ours[name].shape)} and {list(theirs[name].shape)}"
            continue
        difference, is_equal = _difference(first, second, name, box)
        equal += is_equal
        if not is_equal:
            dtypes = {str(e.dtype).removeprefix("torch.") for e in (ours[name], theirs[name])}
            different[name] = f"largest difference {difference:.4g} ({' and '.join(sorted(dtypes))})"
    return {
        "step": [first.info.step, second.info.step],
        "layout": [degrees(c.info.layout) for c in (first, second)],
        "equal_tensors": equal,
        "different_tensors": len(different),
        "different": different,
        "only_in_a": [name for name in ours if name not in theirs],
        "only_in_b": [name for name in theirs if name not in ours],
    }


def _common_rows(a: TensorEntry, b: TensorEntry, vocab: int, *, keep_padding: bool) -> Box | None:
    is_vocab = a.name.removeprefix(OPTIMIZER_PREFIX).startswith(("embedding.word.", "output."))
    if a.shape == b.shape and (keep_padding or not is_vocab):
        return a.box
    if is_vocab and a.shape[1:] == b.shape[1:] and min(a.shape[0], b.shape[0]) >= vocab:
        return ((0, vocab), *a.box[1:])
    return None


def _difference(first: Checkpoint, second: Checkpoint, name: str, box: Box) -> tuple[float, bool]:
    largest, is_equal = 0.0, True
    for part in row_blocks(box, first.tensors.entries[name].dtype.itemsize):
        x, y = first.tensors.read(name, part), second.tensors.read(name, part)
        if not equal_bits(x, y):
            is_equal = False
            difference = (x.double() - y.double()).abs().nan_to_num(nan=math.inf)
            largest = max(largest, float(difference.max()))
    return largest, is_equal
