"""The rank files of a legacy Megatron-LM checkpoint, and which layers and experts each holds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError, InputError
from conversion.megatron_model import MegatronArguments
from conversion.torch_files import read_torch_file
from training.step_folders import TRACKER, list_checkpoints

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
_RANK = re.compile(r"^mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")


@dataclass(frozen=True)
class RankFile:
    """What one rank wrote.

    Args:
        folder: `mp_rank_...`.
        tp, pp, ep: Its ranks.
        content: Of its `model_optim_rng.pt`.
    """

    folder: Path
    tp: int
    pp: int
    ep: int
    content: Mapping[str, Any]

    @property
    def chunks(self) -> list[Mapping[str, Any]]:
        """Its stages of the model: one, or one for each virtual stage."""
        if "model" in self.content:
            return [self.content["model"]]
        return [self.content[f"model{n}"] for n in range(len(self.content)) if f"model{n}" in self.content]


def iteration_folder(path: Path, step: int | None) -> Path:
    """Choose the folder of one iteration.

    Args:
        path: It, or the folder of several that Megatron's `--save` names.
        step: Which of several; None takes the one that the tracker names.

    Raises:
        ConfigError: There is none of that step.
        InputError: The one that the tracker names is not there.
    """
    if any(path.glob("mp_rank_*")):
        return path
    if step is not None:
        folder = path / f"iter_{step:07d}"
        if not folder.is_dir():
            known = ", ".join(str(item.step) for item in list_checkpoints(path)) or "none"
            raise ConfigError(f"step is {step}, and {path} has {known}.")
        return folder
    tracker = path / TRACKER
    if tracker.is_file():
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        is_number = text.isascii() and text.isdecimal() and len(text) < 12
        if text != "release" and not is_number:
            raise InputError(f"{tracker} holds {text[:40]!r}, and a number or release is needed. Give it with --step.")
        folder = path / ("release" if text == "release" else f"iter_{int(text):07d}")
        if not folder.is_dir():
            raise InputError(f"{tracker} names {text!r}, and {folder} is not there. Give the iteration with --step.")
        return folder
    found = list_checkpoints(path)
    if not found:
        raise ConfigError(f"{path} holds no iteration of Megatron-LM.")
    return found[0].path


def rank_files(path: Path, step: int | None) -> dict[str, Path]:
    """Name the files of an iteration, for the digests of a stage that is given them by path."""
    folder = iteration_folder(path, step)
    files = sorted(file for name in (MODEL_FILE, OPTIMIZER_FILE) for file in folder.glob(f"mp_rank_*/{name}"))
    return {f"{file.parent.name}/{file.name}": file for file in files}


def read_ranks(folder: Path) -> tuple[list[RankFile], MegatronArguments]:
    """Read the description of every rank file of an iteration.

    Raises:
        InputError: A rank is missing or there is one too many, or a file is damaged.
    """
    folders = sorted(item for item in folder.iterdir() if item.is_dir() and _RANK.match(item.name))
    if not folders:
        raise InputError(f"{folder}: holds no mp_rank_* folders.")
    contents = {item: _content(item) for item in folders}
    args = MegatronArguments(folders[0] / MODEL_FILE, contents[folders[0]].get("args"))
    sizes = (args.tensor_parallel, args.pipeline_parallel, args.expert_parallel)
    ranks = []
    for item in folders:
        tp, pp, ep = _ranks_of(item, sizes)
        ranks.append(RankFile(item, tp, pp, ep, contents[item]))
    found = {(rank.tp, rank.pp, rank.ep) for rank in ranks}
    wanted = [(t, p, e) for t in range(sizes[0]) for p in range(sizes[1]) for e in range(sizes[2])]
    numbers = f"tensor {sizes[0]} x pipeline {sizes[1]} x expert {sizes[2]} parallel"
    for place in wanted:
        if place not in found:
            raise InputError(
                f"{folder}: the part of tensor-parallel rank {place[0]}, pipeline rank {place[1]}, expert rank "
                f"{place[2]} is missing; args say {numbers}, and there are {len(ranks)} parts. Restore it."
            )
    if len(found) > len(wanted):
        extra = next(rank for rank in ranks if (rank.tp, rank.pp, rank.ep) not in set(wanted))
        raise InputError(f"{extra.folder} is one part too many; args say {numbers}.")
    _check_writers(ranks, args)
    return sorted(ranks, key=lambda rank: (rank.pp, rank.ep, rank.tp)), args


def _check_writers(ranks: Sequence[RankFile], args: MegatronArguments) -> None:
    """Make sure that folders hold what their names say, by the number of the rank that each file's args name.

    Files that one process wrote for all ranks, as converters do, name one rank; nothing is learned from them.

    Raises:
        InputError: Folders have been renamed, or one is a copy of another.
    """
    writers = [MegatronArguments(rank.folder / MODEL_FILE, rank.content.get("args")).get("rank") for rank in ranks]
    if len(set(writers)) < 2 or not all(isinstance(writer, int) for writer in writers):
        return
    world, pp_size = args.size("world_size", default=0), args.pipeline_parallel
    for rank, writer in zip(ranks, writers, strict=True):
        is_tp = writer % args.tensor_parallel == rank.tp
        # Pipeline ranks are the outermost, unless the run said otherwise.
        is_known = world % pp_size == 0 and world > 0 and not args.get("use_tp_pp_dp_mapping")
        is_pp = not is_known or writer // (world // pp_size) == rank.pp
        if not is_tp or not is_pp or writers.count(writer) > 1:
            raise InputError(
                f"{rank.folder / MODEL_FILE} was written by rank {writer} of {world}, which is another part than the "
                "folder's name says, or stands there twice. Folders have been renamed or copied; restore them."
            )


def _content(folder: Path) -> Mapping[str, Any]:
    path = folder / MODEL_FILE
    content = read_torch_file(path)
    if not isinstance(content, Mapping) or not any(str(key).startswith("model") for key in content):
        raise InputError(f"{path}: holds no model.")
    return content


def _ranks_of(folder: Path, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """Ranks from a folder's name; a second number is the pipeline's, or the experts' where there is no pipeline."""
    found = _RANK.match(folder.name)
    numbers = [int(n) for n in found.groups() if n is not None] if found else []
    if len(numbers) == 3:
        return numbers[0], numbers[1], numbers[2]
    if len(numbers) == 2:
        has_pipeline = sizes[1] > 1 or sizes[2] == 1
        return (numbers[0], numbers[1], 0) if has_pipeline else (numbers[0], 0, numbers[1])
    return numbers[0], 0, 0


def layer_numbers(args: MegatronArguments, ranks: Sequence[RankFile], counts: Mapping[tuple[int, int], int]) -> Any:
    """Number in the whole model of the first layer of each stage: (pipeline rank, chunk) to number.

    Stages follow each other chunk by chunk: the first chunk of every rank, then the second. How many layers each
    has is counted in the files, so uneven splits need no rule.

    Args:
        counts: (pipeline rank, chunk) to layers there.

    Raises:
        InputError: Together they are not as many as args say.
    """
    chunks = max(chunk for _, chunk in counts) + 1
    firsts, total = {}, 0
    for chunk in range(chunks):
        for stage in range(args.pipeline_parallel):
            firsts[stage, chunk] = total
            total += counts.get((stage, chunk), 0)
    layers = args.size("num_layers", "encoder_num_layers")
    if total != layers:
        raise InputError(f"{args.path.parent.parent}: its files hold {total} layers, and args say {layers}.")
    return firsts
