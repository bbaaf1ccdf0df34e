"""Where the optimizer's state of each parameter lies in the files of a legacy Megatron-LM rank.

Three kinds are known: plain Adam, which numbers parameters; Adam over 16-bit weights, which adds float32 masters;
and the distributed optimizer, which keeps flat buffers. None of them names a parameter: the order of the model's own
dictionary, in the same file, decides (Megatron-LM d98e8a64, param_and_grad_buffer.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from contracts.errors import InputError
from conversion.assembled import read_stored
from conversion.catalogue import num_elements
from conversion.file_reading import FileReader
from conversion.megatron_folder import OPTIMIZER_FILE, RankFile
from conversion.megatron_model import MegatronArguments
from conversion.torch_files import StoredTensor, read_torch_file
from training.parameters import MOMENTS

MASTER = "master"  # the float32 weight itself
_ALIGNMENT = 64  # elements
_CHECKED = 64  # elements at either end of a parameter that are compared with the model's


@dataclass(frozen=True)
class LocalWeight:
    """A parameter of a rank.

    Args:
        name: In the file.
        stored: Its weight.
        is_expert: It belongs to an expert.
        is_shared: The embedding, or its copy, that the first and the last stage share.
    """

    name: str
    stored: StoredTensor
    is_expert: bool
    is_shared: bool

    @property
    def has_decay(self) -> bool:
        return len(self.stored.shape) > 1 and not self.name.endswith(".bias")


States = dict[str, StoredTensor]


def optimizer_states(
    rank: RankFile, chunks: Sequence[Sequence[LocalWeight]], args: MegatronArguments, files: FileReader
) -> list[list[States]] | None:
    """Find the states of every parameter.

    Args:
        chunks: Parameters of each of the rank's stages, in the order of the file.

    Returns:
        For each parameter of `chunks` its states: "exp_avg", "exp_avg_sq" and perhaps "master". None where the
        checkpoint holds no optimizer.

    Raises:
        InputError: They do not fit the parameters.
    """
    path = rank.folder / OPTIMIZER_FILE
    if path.is_file():
        found = _distributed(path, read_torch_file(path), rank, chunks, args)
    else:
        state = rank.content.get("optimizer")
        if state is None:
            return None
        found = _numbered(rank, state, chunks)
    for weights, states in zip(chunks, found, strict=True):
        for weight, own in zip(weights, states, strict=True):
            _check(rank, weight, own, files)
    return found


def _numbered(rank: RankFile, state: Any, chunks: Sequence[Sequence[LocalWeight]]) -> list[list[States]]:
    every = [weight for weights in chunks for weight in weights]
    parts = state if isinstance(state, list) else [state]
    found: dict[int, States] = {}
    for number, part in enumerate(parts):
        # With experts of their own there are two optimizers: of the others and of theirs.
        members = [n for n, w in enumerate(every) if len(parts) == 1 or w.is_expert == (number == 1)]
        order = [n for n in members if every[n].has_decay] + [n for n in members if not every[n].has_decay]
        masters = [w for group in part.get("fp32_from_fp16_params", ()) for w in group]
        inner = part.get("optimizer", part)
        moments = inner.get("state", {}) if isinstance(inner, Mapping) else {}
        if len(moments) != len(order):
            raise InputError(
                f"{rank.folder}: its optimizer knows {len(moments)} parameters, and its model has {len(order)}."
            )
        for place, index in enumerate(order):
            own = moments.get(place, {})
            found[index] = {
                key: own[key] for key in ("exp_avg", "exp_avg_sq") if isinstance(own.get(key), StoredTensor)
            }
            if masters:
                found[index][MASTER] = masters[place]
    flat = iter(found[n] for n in range(len(every)))
    return [[next(flat) for _ in weights] for weights in chunks]


def _distributed(
    path: Any, content: Any, rank: RankFile, chunks: Sequence[Sequence[LocalWeight]], args: MegatronArguments
) -> list[list[States]]:
    parts = content if isinstance(content, list) else [content]
    found: list[dict[int, States]] = [{} for _ in chunks]
    for number, part in enumerate(parts):
        if part is None:  # of experts' ranks only the first writes what all of them share
            for chunk, weights in enumerate(chunks):
                found[chunk] |= {n: {} for n, w in enumerate(weights) if w.is_expert == (number == 1)}
            continue
        if not isinstance(part, Mapping) or not part.get("buckets_coalesced"):
            raise InputError(f"{path}: is of a Megatron-LM before 2024 (buckets apart), which cannot be read yet.")
        for chunk, weights in enumerate(chunks):
            members = [n for n, w in enumerate(weights) if len(parts) == 1 or w.is_expert == (number == 1)]
            if not members:
                continue
            buffers = part.get(chunk)
            if not isinstance(buffers, Mapping) or len(buffers) != 1:
                raise InputError(f"{path}: has no single buffer for stage {chunk} of the rank.")
            buffer = next(iter(buffers.values()))
            limit = bucket_limit(args, rank.pp, chunk)
            starts, total = flat_places([weights[n] for n in members], limit)
            if int(buffer.get("numel_unpadded", total)) != total:
                raise InputError(
                    f"{path}: its buffer has {buffer['numel_unpadded']} elements, and the model's parameters make "
                    f"{total}."
                )
            for start, index in zip(starts, members, strict=True):
                shape = weights[index].stored.shape
                states = {key: buffer[key].part(start, shape) for key in MOMENTS}
                found[chunk][index] = {**states, MASTER: buffer["param"].part(start, shape)}
    return [[states[n] for n in range(len(weights))] for states, weights in zip(found, chunks, strict=True)]


def bucket_limit(args: MegatronArguments, pp: int, chunk: int) -> int | None:
    """Elements at which a bucket is closed: only where gradients are reduced while backward runs."""
    if not args.get("overlap_grad_reduce") or pp > 0 or chunk > 0:
        return None
    dp = args.size("data_parallel_size", default=1)
    return args.size("ddp_bucket_size", default=max(40_000_000, 1_000_000 * dp))


def flat_places(weights: Sequence[LocalWeight], bucket_limit: int | None) -> tuple[list[int], int]:
    """Return where each parameter begins in the flat buffer, and the buffer's size, in elements.

    Padding between buckets is left out of the file.
    """
    places, sizes = bucket_places(weights, bucket_limit)
    bases = [sum(sizes[:bucket]) for bucket in range(len(sizes))]
    return [bases[bucket] + start for bucket, start in places], sum(sizes)


def bucket_places(weights: Sequence[LocalWeight], bucket_limit: int | None) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the bucket of each parameter with where it begins there, and the size of each bucket, in elements.

    Parameters go in from the last to the first, each to a multiple of 64 within its bucket.
    """
    places = [(0, 0)] * len(weights)
    sizes: list[int] = []
    cursor = 0
    for index in range(len(weights) - 1, -1, -1):
        weight = weights[index]
        if weight.is_shared and cursor:
            sizes.append(cursor)
            cursor = 0
        begin = -(-cursor // _ALIGNMENT) * _ALIGNMENT
        places[index] = len(sizes), begin
        cursor = begin + num_elements(weight.stored.shape)
        if weight.is_shared or (bucket_limit is not None and cursor >= bucket_limit):
            sizes.append(cursor)
            cursor = 0
    return places, [*sizes, cursor] if cursor else sizes


def _check(rank: RankFile, weight: LocalWeight, states: States, files: FileReader) -> None:
    """Make sure that states are of this parameter: its shape, and a master that rounds to its weight.

    Raises:
        InputError: They are not.
    """
    if not states:
        return
    for name in MOMENTS:
        state = states.get(name)
        if state is None or state.shape != weight.stored.shape:
            shape = None if state is None else list(state.shape)
            raise InputError(
                f"{rank.folder}: {name} of {weight.name} has the shape {shape}, and its weight "
                f"{list(weight.stored.shape)}."
            )
    if MASTER not in states:
        return
    count = num_elements(weight.stored.shape)
    for first in {0, max(0, count - _CHECKED)}:
        size = (min(_CHECKED, count - first),)
        master = read_stored(files, states[MASTER].part(first, size))
        own = read_stored(files, weight.stored.part(first, size))
        if not torch.equal(master.to(own.dtype), own):
            raise InputError(
                f"{rank.folder}: the optimizer's copy of {weight.name} is not its weight: a file is damaged or of "
                "another checkpoint, or the buffers are laid out in a way that is not known here."
            )
