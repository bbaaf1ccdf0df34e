"""Opens Megatron-Core's `torch_dist` checkpoints as canonical tensors, weights and optimizer.

Tensors are whole there, whatever the layout that wrote them: layers and experts are stacked into one, or each has its
own (facts of the format: Megatron-Core 0.16, dist_checkpointing).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from contracts.errors import InputError
from conversion.catalogue import Catalogue, Checkpoint, Shape, TensorEntry
from conversion.megatron_facts import (
    check_vocabulary,
    checkpoint_info,
    checkpoint_notes,
    expected_shapes,
    head_dim,
    stored_facts,
)
from conversion.megatron_model import MegatronArguments, model_settings
from conversion.megatron_names import QkvOrder, flat_name, named, places
from conversion.megatron_optimizer import MASTER
from conversion.native import NativeCatalogue
from conversion.torch_dist_folder import COMMON, torch_dist_folder
from conversion.torch_dist_optimizer import OptimizerViews, optimizer_views
from conversion.torch_files import read_torch_file
from conversion.views import View, ViewCatalogue
from training.parameters import MOMENTS, OPTIMIZER_PREFIX

_LAYERS = re.compile(r"^((?:decoder|encoder)\.layers)\.(?:(\d+)\.)?(.+)$")
_EXPERTS = re.compile(r"^mlp\.experts\.(?:experts|local_experts)\.(?:(\d+)\.)?(linear_fc[12]\.(?:weight|bias))$")
_HALVES = {"_w": ".gate.", "_v": ".up."}  # of a gated matrix, where each has a tensor of its own
_EMBEDDING, _OUTPUT = "embedding.word.weight", "output.weight"
Views = dict[str, list[View]]


def open_torch_dist(path: Path, step: int | None) -> Checkpoint:
    """Open one iteration.

    Args:
        path: Its folder, or that of several.
        step: Which of several; None takes the one that the tracker names.

    Raises:
        ConfigError: There is none of that step.
        InputError: It is damaged or not whole, or of a model that Shardline does not compute.
    """
    folder = torch_dist_folder(path, step)
    common = read_torch_file(folder / COMMON)
    if not isinstance(common, Mapping):
        raise InputError(f"{folder / COMMON}: holds no settings.")
    args = MegatronArguments(folder / COMMON, common.get("args"))
    stored = NativeCatalogue(folder)
    try:
        return _opened(folder, common, args, stored)
    except BaseException:
        stored.close()
        raise


def _opened(folder: Path, common: Mapping[str, Any], args: MegatronArguments, stored: NativeCatalogue) -> Checkpoint:
    weights, by_key = _weights(folder, stored.entries, args)
    rows = sum(view.shape[0] for view in weights.get(_EMBEDDING, ()))
    check_vocabulary(args, rows)
    model = model_settings(args, set(weights), rows)
    shapes = expected_shapes(folder, model, weights)
    optimizer = optimizer_views(folder, stored, args, model, by_key)
    masters = optimizer.states.get(MASTER, {})
    views: Views = {name: masters.get(name, weights[name]) for name in shapes}
    has_optimizer = any(optimizer.states.get(moment) for moment in MOMENTS)
    whole = dict(shapes)
    for name in shapes if has_optimizer else ():
        for moment in MOMENTS:
            if name not in optimizer.states.get(moment, {}):
                raise InputError(f"{folder}: has no {moment} of {name}, and that of other parameters.")
            views[f"{OPTIMIZER_PREFIX}{name}.{moment}"] = optimizer.states[moment][name]
            whole[f"{OPTIMIZER_PREFIX}{name}.{moment}"] = shapes[name]
    tensors = ViewCatalogue(folder, optimizer.source, views, whole)
    _check_masters(
        folder, ViewCatalogue(folder, stored, {n: weights[n] for n in masters if n in shapes}, shapes), tensors
    )
    info = checkpoint_info(common, args, model, shapes, has_optimizer=has_optimizer, dtype=tensors.entries)
    notes = checkpoint_notes(common, args, model, weights, masters)
    if any(name.startswith("rng_state/") for name in stored.objects):
        notes += ("left behind: generator states, which belong to ranks (nothing here draws from them)",)
    return Checkpoint(folder, "mcore_dist", info, tensors, notes + optimizer.notes, _facts(args, optimizer, by_key))


def _weights(
    folder: Path, entries: Mapping[str, TensorEntry], args: MegatronArguments
) -> tuple[Views, dict[str, list[tuple[str, View]]]]:
    """Name the weights: canonical name to views, and stored name to canonical names with their views."""
    weights: Views = {}
    by_key: dict[str, list[tuple[str, View]]] = {}
    is_tied = not args.get("untie_embeddings_and_output_weights", default=False)
    for key, entry in entries.items():
        if re.match(r"^(?:chained_\d+\.)?(?:optimizer|rng_state|rerun_state)\b", key):
            continue
        try:
            found = list(_views_of(key, entry.shape, args))
        except (KeyError, IndexError):
            raise InputError(
                f"{folder}: does not know where the tensor {key} of shape {list(entry.shape)} belongs; it is of a "
                "model that Shardline does not compute."
            ) from None
        if is_tied and found and found[0][0] == _OUTPUT:
            continue
        by_key[flat_name(key)] = found
        for canonical, view in found:
            weights.setdefault(canonical, []).append(view)
    return weights, by_key


def _views_of(key: str, shape: Shape, args: MegatronArguments) -> Iterator[tuple[str, View]]:
    """Say which parts of canonical tensors a stored one holds.

    Raises:
        KeyError: Its name is not known.
        IndexError: It has fewer dimensions than one of its name.
    """
    name = flat_name(key)
    half = name[-2:] if name[-2:] in _HALVES else ""
    name = name.removesuffix(half)
    for lead, full in _unstacked(name, shape):
        inner = shape[len(lead) :]
        layers = {n: n for n in range(args.size("num_layers", "encoder_num_layers"))}
        item = named(full, layers, 0)
        if item is None:
            return
        if half:
            canonical = _HALVES[half].join(item.canonical.rsplit(".up.", 1))
            yield canonical, View((0,) * len(inner), inner, key, lead, (0,) * len(inner))
            continue
        for place in places(item, inner, 0, is_gated=bool(args.get("swiglu")), qkv=QkvOrder(3.0, head_dim(args))):
            part, rest = (place.rows, *inner[1:]), (0,) * (len(inner) - 1)
            yield place.canonical, View(place.at, part, key, lead, (place.first_row, *rest))


def _unstacked(name: str, shape: Shape) -> Iterator[tuple[Shape, str]]:
    """Yield the first indices of each layer and expert in a tensor, with the name that it has by itself."""
    found = _LAYERS.match(name)
    if found is None:
        yield (), name
        return
    stack, number, rest = found.groups()
    layers = [((), int(number))] if number is not None else [((n,), n) for n in range(shape[0])]
    for lead, layer in layers:
        expert = _EXPERTS.match(rest)
        if expert is None:
            yield lead, f"{stack}.{layer}.{rest}"
            continue
        numbers = [((), int(expert[1]))] if expert[1] is not None else [((n,), n) for n in range(shape[len(lead)])]
        for inner, one in numbers:
            yield (*lead, *inner), f"{stack}.{layer}.mlp.experts.local_experts.{one}.{expert[2]}"


def _check_masters(folder: Path, weights: Catalogue, masters: Catalogue) -> None:
    """Make sure that the optimizer's float32 weights round to the model's, at the first and the last row of each.

    Raises:
        InputError: One does not.
    """
    for name, entry in weights.entries.items():
        rows = entry.shape[0] if entry.shape else 1
        for row in {0, rows - 1}:
            box = ((row, row + 1), *entry.box[1:])
            own = weights.read(name, box)
            if not torch.equal(masters.read(name, box).to(own.dtype), own):
                raise InputError(
                    f"{folder}: the optimizer's copy of {name} is not its weight: a file is damaged or of another "
                    "checkpoint, or the buffers are laid out in a way that is not known here."
                )


def _facts(args: MegatronArguments, optimizer: OptimizerViews, keys: Mapping[str, Any]) -> dict[str, Any]:
    is_stacked = any(".layers." in key and not re.search(r"\.layers\.\d", key) for key in keys)
    return stored_facts(args, optimizer.kind) | {"layers": "stacked in one tensor" if is_stacked else "a tensor each"}
