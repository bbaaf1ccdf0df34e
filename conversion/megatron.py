"""Opens legacy Megatron-LM checkpoints (`mp_rank_*` folders) of any layout as canonical tensors."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.errors import InputError
from conversion.assembled import AssembledCatalogue, Part, read_stored
from conversion.catalogue import Checkpoint, Shape, equal_bits, num_elements
from conversion.file_reading import FileReader
from conversion.megatron_facts import (
    check_vocabulary,
    checkpoint_info,
    checkpoint_notes,
    expected_shapes,
    head_dim,
    stored_facts,
)
from conversion.megatron_folder import MODEL_FILE, OPTIMIZER_FILE, RankFile, iteration_folder, layer_numbers, read_ranks
from conversion.megatron_model import MegatronArguments, model_settings
from conversion.megatron_names import Named, QkvOrder, flat_name, named, places
from conversion.megatron_optimizer import MASTER, LocalWeight, optimizer_states
from conversion.torch_files import StoredTensor, check_sums, tensors_in
from training.parameters import MOMENTS, OPTIMIZER_PREFIX

_LAYER = re.compile(r"^\w+\.layers\.(\d+)\.")
EMBEDDING, OUTPUT = "embedding.word.weight", "output.weight"


def open_megatron(path: Path, step: int | None) -> Checkpoint:
    """Open one iteration.

    Args:
        path: Its folder, or that of several.
        step: Which of several; None takes the one that the tracker names.

    Raises:
        ConfigError: There is none of that step.
        InputError: It is damaged, a part is missing, or it is of a model that Shardline does not compute.
    """
    folder = iteration_folder(path, step)
    ranks, args = read_ranks(folder)
    files = FileReader()
    try:
        pieces = _gathered(folder, ranks, args, files)
        _refuse_copies(folder, pieces, files)
    finally:
        files.close()
    rows = sum(part.stored.shape[0] for part in pieces.parts[EMBEDDING]) if EMBEDDING in pieces.parts else 0
    check_vocabulary(args, rows)
    model = model_settings(args, set(pieces.parts), rows)
    shapes = expected_shapes(folder, model, pieces.parts)
    parts: dict[str, list[Part]] = {name: pieces.masters.get(name, pieces.parts[name]) for name in shapes}
    for name in shapes if pieces.moments else ():
        for state, found in _moments_of(folder, name, pieces).items():
            parts[f"{OPTIMIZER_PREFIX}{name}.{state}"] = found
    whole = shapes | {name: shapes[_weight_of(name)] for name in parts if name.startswith(OPTIMIZER_PREFIX)}
    tensors = AssembledCatalogue(folder, parts, whole)
    info = checkpoint_info(
        ranks[0].content, args, model, shapes, has_optimizer=bool(pieces.moments), dtype=tensors.entries
    )
    notes = checkpoint_notes(ranks[0].content, args, model, pieces.parts, pieces.masters)
    facts = stored_facts(args, _optimizer_kind(folder, pieces)) | {
        "rank_files": len(ranks),
        "checkpoint_version": ranks[0].content.get("checkpoint_version", 0),
    }
    return Checkpoint(folder, "megatron", info, tensors, notes, facts)


def _optimizer_kind(folder: Path, pieces: "_Pieces") -> str:
    if any(folder.glob(f"mp_rank_*/{OPTIMIZER_FILE}")):
        return f"distributed, flat buffers ({OPTIMIZER_FILE})"
    if not pieces.moments:
        return "none"
    return "Adam over 16-bit weights, with float32 masters" if pieces.masters else "plain Adam"


def check_megatron_files(folder: Path) -> None:
    """Compare every file of an iteration with the checksums that its writer put in.

    Raises:
        InputError: One is damaged.
    """
    for name in (MODEL_FILE, OPTIMIZER_FILE):
        for path in sorted(folder.glob(f"mp_rank_*/{name}")):
            check_sums(path)


@dataclass
class _Pieces:
    """Parts of tensors by canonical name: weights, their float32 masters, and moments by state."""

    parts: dict[str, list[Part]] = field(default_factory=dict)
    masters: dict[str, list[Part]] = field(default_factory=dict)
    moments: dict[str, dict[str, list[Part]]] = field(default_factory=dict)
    known: dict[tuple[str, Shape], StoredTensor] = field(default_factory=dict)


def _gathered(folder: Path, ranks: list[RankFile], args: MegatronArguments, files: FileReader) -> _Pieces:
    """Put the parameters of all ranks and their states where they belong."""
    firsts = layer_numbers(args, ranks, _layer_counts(ranks))
    experts = args.size("num_experts", default=0) // max(1, args.expert_parallel)
    is_tied = not args.get("untie_embeddings_and_output_weights", default=False)
    qkv = QkvOrder(float(ranks[0].content.get("checkpoint_version", 0)), head_dim(args))
    pieces = _Pieces()
    for rank in ranks:
        members: list[list[tuple[LocalWeight, Named]]] = []
        for number, chunk in enumerate(rank.chunks):
            first = firsts[rank.pp, number]
            numbers = {n: first + n for n in range(args.size("num_layers", "encoder_num_layers"))}
            members.append(list(_local_weights(rank, chunk, numbers, rank.ep * experts, args, is_tied=is_tied)))
        states = optimizer_states(rank, [[weight for weight, _ in one] for one in members], args, files)
        for number, one in enumerate(members):
            for place, (weight, name) in enumerate(one):
                own = states[number][place] if states is not None else {}
                _place(folder, pieces, rank, weight, name, own, args, qkv, files)
    return pieces


def _refuse_copies(folder: Path, pieces: _Pieces, files: FileReader) -> None:
    """Refuse tensor-parallel parts that are copies of each other: one file stands there twice.

    Raises:
        InputError: The parts of the embedding and of a projection are the same, and not of one value.
    """
    for name in (EMBEDDING, "layers.0.attn.qkv.weight", "layers.0.attn.out.weight"):
        parts = pieces.parts.get(name, [])
        if len(parts) < 2 or parts[0].stored.shape != parts[1].stored.shape:
            return
        first, second = (read_stored(files, part.stored) for part in parts[:2])
        if not equal_bits(first, second) or bool((first == first.flatten()[0]).all()):
            return
    raise InputError(
        f"{parts[1].stored.path} holds the same part of the model as {parts[0].stored.path}, and they should be two "
        "different ones. A folder has been copied over another; restore it."
    )


def _local_weights(
    rank: RankFile,
    chunk: Mapping[str, Any],
    layers: dict[int, int],
    first_expert: int,
    args: MegatronArguments,
    *,
    is_tied: bool,
) -> Iterator[tuple[LocalWeight, Named]]:
    seen: set[tuple[int, Shape]] = set()
    for full, stored in tensors_in(chunk):
        name = flat_name(full)
        try:
            found = named(name, layers, first_expert)
        except KeyError:
            raise InputError(
                f"{rank.folder / MODEL_FILE}: does not know where the parameter {full} belongs; it is of a model that "
                "Shardline does not compute."
            ) from None
        key = (stored.start, stored.shape)
        if found is None or key in seen:  # one tensor under two names
            continue
        seen.add(key)
        is_head = found.canonical == OUTPUT and is_tied
        if is_head:
            found = Named(EMBEDDING, "rows")
        is_shared = is_tied and args.pipeline_parallel > 1 and found.canonical == EMBEDDING
        yield LocalWeight(name, stored, found.is_expert and args.expert_parallel > 1, is_shared), found


def _place(
    folder: Path,
    pieces: _Pieces,
    rank: RankFile,
    weight: LocalWeight,
    name: Named,
    states: Mapping[str, StoredTensor],
    args: MegatronArguments,
    qkv: QkvOrder,
    files: FileReader,
) -> None:
    shape = weight.stored.shape
    columns = num_elements(shape[1:])
    for place in places(name, shape, rank.tp, is_gated=bool(args.get("swiglu")), qkv=qkv):
        part_shape = (place.rows, *shape[1:])

        def part_of(stored: StoredTensor, first: int = place.first_row, at: Shape = place.at) -> Part:
            return Part(at, stored.part(first * columns, part_shape))  # noqa: B023

        key = (place.canonical, place.at)
        part = part_of(weight.stored)
        if key in pieces.known:  # another rank's copy: it counts once, and must be the same
            if not equal_bits(read_stored(files, pieces.known[key]), read_stored(files, part.stored)):
                raise InputError(
                    f"{weight.stored.path}: its copy of {weight.name} differs from that in {pieces.known[key].path}, "
                    "and both should be the same. The ranks have drifted apart, or a file is damaged."
                )
            continue
        pieces.known[key] = part.stored
        pieces.parts.setdefault(place.canonical, []).append(part)
        for state, stored in states.items():
            if state == MASTER:
                pieces.masters.setdefault(place.canonical, []).append(part_of(stored))
            else:
                pieces.moments.setdefault(place.canonical, {}).setdefault(state, []).append(part_of(stored))


def _layer_counts(ranks: list[RankFile]) -> dict[tuple[int, int], int]:
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        if rank.tp or rank.ep:
            continue
        for number, chunk in enumerate(rank.chunks):
            found = (_LAYER.match(flat_name(name)) for name, _ in tensors_in(chunk))
            layers = {int(match[1]) for match in found if match is not None}
            if layers != set(range(len(layers))):
                raise InputError(f"{rank.folder / MODEL_FILE}: its layers {sorted(layers)} have gaps.")
            counts[rank.pp, number] = len(layers)
    return counts


def _moments_of(folder: Path, name: str, pieces: _Pieces) -> dict[str, list[Part]]:
    found = pieces.moments.get(name, {})
    if missing := [state for state in MOMENTS if state not in found]:
        raise InputError(f"{folder}: has no {missing[0]} of {name}, and that of other parameters.")
    return found


def _weight_of(state: str) -> str:
    return state.removeprefix(OPTIMIZER_PREFIX).rpartition(".")[0]
