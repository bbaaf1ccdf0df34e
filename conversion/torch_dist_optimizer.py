"""Where a `torch_dist` checkpoint keeps the optimizer's state of each weight.

`optimizer.state.*` keys name the weight: whole tensors (`fully_reshardable`, plain Adam) or, in
`fully_sharded_model_space`, blocks of it laid out flat. `dp_reshardable` keeps the ranks' flat buffers, which name
nothing: the order of a rank's parameters decides, as in the files of `mp_rank_*` folders.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from contracts.errors import ConfigError, InputError
from conversion.catalogue import Catalogue, Shape, box_shape, num_elements
from conversion.megatron_model import MegatronArguments
from conversion.megatron_names import flat_name
from conversion.megatron_optimizer import MASTER, LocalWeight, bucket_limit, bucket_places
from conversion.megatron_writing import LocalParameter, local_parameters, refuse_inexpressible
from conversion.torch_files import StoredTensor
from conversion.views import View, ViewCatalogue
from training.config import LayoutConfig
from training.model_config import ModelConfig

_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(param|fp32_param|exp_avg|exp_avg_sq)\.(.+)$")
_BUCKET = re.compile(
    r"^(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.(?:dtype_.+?\.)?"
    r"bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)$"
)
_STATES = {"param": MASTER, "fp32_param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@dataclass(frozen=True)
class OptimizerViews:
    """States of the weights.

    Args:
        source: What the views read.
        kind: How they are stored.
        states: "exp_avg", "exp_avg_sq" and perhaps "master" to canonical name to views.
        notes: What is left behind.
    """

    source: Catalogue
    kind: str = "none"
    states: Mapping[str, Mapping[str, list[View]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def optimizer_views(
    folder: Path,
    stored: Catalogue,
    args: MegatronArguments,
    model: ModelConfig,
    weights: Mapping[str, Sequence[tuple[str, View]]],
) -> OptimizerViews:
    """Find the states of every weight.

    Args:
        stored: Tensors of the checkpoint.
        weights: Stored name to canonical names, with the views that each takes of it.

    Raises:
        InputError: States do not fit the weights.
    """
    states = [(key, match) for key in stored.entries if (match := _STATE.match(key)) is not None]
    if states:
        return _named_states(folder, stored, states, weights)
    buckets = {
        (int(match[1]), int(match[2]), int(match[3]), _STATES[match[4]]): key
        for key in stored.entries
        if (match := _BUCKET.match(key)) is not None
    }
    if buckets:
        return _bucket_states(folder, stored, buckets, args, model)
    objects: Iterable[str] = getattr(stored, "objects", ())
    if any(".param_state" in key for key in objects):
        return OptimizerViews(
            stored,
            "dp_zero_gather_scatter",
            notes=("left behind: the optimizer's state, one object for each rank (dp_zero_gather_scatter)",),
        )
    return OptimizerViews(stored)


def _named_states(
    folder: Path,
    stored: Catalogue,
    states: Sequence[tuple[str, re.Match[str]]],
    weights: Mapping[str, Sequence[tuple[str, View]]],
) -> OptimizerViews:
    found: dict[str, dict[str, list[View]]] = {}
    blocks: dict[str, list[View]] = {}
    shapes: dict[str, Shape] = {}
    for key, match in states:
        name = flat_name(match[2])
        if name not in weights:
            raise InputError(f"{folder}: holds {key}, and no weight {name}.")
        shape = stored.entries[weights[name][0][1].key].shape
        own = stored.entries[key].shape
        shapes[key] = shape
        blocks[key] = [View((0,) * len(own), own, key, (), (0,) * len(own))]
        if own != shape:
            blocks[key] = list(_flat_blocks(folder, key, own, shape))
        for canonical, view in weights[name]:
            found.setdefault(_STATES[match[1]], {}).setdefault(canonical, []).append(replace(view, key=key))
    is_flat = any(view.is_flat for views in blocks.values() for view in views)
    if is_flat:
        used = {view.key for views in weights.values() for _, view in views}
        for key in used:
            entry = stored.entries[key]
            shapes[key], blocks[key] = (
                entry.shape,
                [View((0,) * len(entry.shape), entry.shape, key, (), (0,) * len(entry.shape))],
            )
    if is_flat:
        kind = "distributed (fully_sharded_model_space)"
    elif any(match[1] == "param" for _, match in states):
        kind = "distributed (fully_reshardable)"
    else:
        kind = "Adam over 16-bit weights, with float32 masters" if MASTER in found else "plain Adam"
    return OptimizerViews(ViewCatalogue(folder, stored, blocks, shapes) if is_flat else stored, kind, found)


def _flat_blocks(folder: Path, key: str, own: Shape, shape: Shape) -> Iterator[View]:
    """Undo the flattening of a tensor's blocks: [X/x, Y/y, x*y] holds the blocks of [x, y] of [X, Y], each row by row.

    Raises:
        InputError: The shape is no such one.
    """
    counts = own[:-1]
    is_cut = len(counts) == len(shape) and all(n > 0 and size % n == 0 for n, size in zip(counts, shape, strict=True))
    block = tuple(size // n for size, n in zip(shape, counts, strict=True)) if is_cut else ()
    if not is_cut or num_elements(block) != own[-1]:
        raise InputError(f"{folder}: {key} has the shape {list(own)}, which does not fit its weight's {list(shape)}.")
    for index in product(*(range(n) for n in counts)):
        at = tuple(n * size for n, size in zip(index, block, strict=True))
        yield View(at, block, key, index, (0,), is_flat=True)


def _bucket_states(
    folder: Path,
    stored: Catalogue,
    buckets: Mapping[tuple[int, int, int, str], str],
    args: MegatronArguments,
    model: ModelConfig,
) -> OptimizerViews:
    kind = "distributed, flat buffers of the ranks (dp_reshardable)"
    if args.expert_parallel > 1:
        why = f"left behind: the optimizer's state, {kind} of an expert-parallel run, which are not read"
        return OptimizerViews(stored, kind, notes=(why,))
    tensor, pipeline, chunks = args.tensor_parallel, args.pipeline_parallel, args.virtual_pipeline
    layout = LayoutConfig(tensor_parallel=tensor, pipeline_parallel=pipeline * chunks)
    try:
        refuse_inexpressible(model, layout)
    except ConfigError as error:
        raise InputError(f"{folder}: the order of its optimizer's buffers is not known. {error}") from error
    found: dict[str, dict[str, list[View]]] = {}
    for chunk, pp, tp in product(range(chunks), range(pipeline), range(tensor)):
        parameters = list(local_parameters(model, layout, chunk * pipeline + pp, tp))
        if args.get("transformer_impl", default="local") != "local":
            parameters = list(_fused_order(parameters))
        local = [
            LocalWeight(p.name, StoredTensor(folder, 0, torch.float32, p.shape), False, p.is_shared) for p in parameters
        ]
        where, _ = bucket_places(local, bucket_limit(args, pp, chunk))
        for parameter, (bucket, start) in zip(parameters, where, strict=True):
            for state in set(_STATES.values()):
                key = buckets.get((tp + tensor * pp, chunk, bucket, state))
                if key is None:
                    raise InputError(
                        f"{folder}: has no buffer of {state} for tensor-parallel rank {tp}, pipeline rank {pp}, stage "
                        f"{chunk}, bucket {bucket}, where {parameter.name} belongs."
                    )
                _add(found.setdefault(state, {}), parameter, key, start)
    return OptimizerViews(stored, kind, found)


def _add(views: dict[str, list[View]], parameter: LocalParameter, key: str, start: int) -> None:
    for piece in parameter.pieces:
        shape = box_shape(piece.box)
        view = View(tuple(a for a, _ in piece.box), shape, key, (), (start,), is_flat=True)
        start += num_elements(shape)
        known = views.setdefault(piece.canonical, [])
        if all(other.at != view.at for other in known):  # else the copy of another rank
            known.append(view)


def _fused_order(parameters: Iterable[LocalParameter]) -> Iterator[LocalParameter]:
    """Order as Transformer Engine's layers do: a norm belongs to the matrix behind it."""
    held: list[Any] = []
    parameters = list(parameters)
    has_experts = any(".mlp.router." in p.name for p in parameters)
    for parameter in parameters:
        is_norm = ".input_layernorm." in parameter.name or (".pre_mlp_layernorm." in parameter.name and not has_experts)
        if is_norm:
            held.append(parameter)
            continue
        if parameter.name.endswith(("self_attention.linear_qkv.weight", ".mlp.linear_fc1.weight")):
            yield from held
            held = []
        yield parameter
