"""Decides from settings and an open source what will be written, before any byte is."""

import math
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from contracts.errors import ConfigError
from conversion.casting import DTYPES, Caster
from conversion.catalogue import Checkpoint
from conversion.config import ReshapeConfig
from conversion.huggingface_writing import HuggingFaceTarget
from conversion.linked_rows import derive_resized
from conversion.megatron_writing import MegatronTarget
from conversion.native_writing import NativeTarget
from conversion.reading import model_of
from training.config import LayoutConfig, ModelConfig, check_layout
from training.optimizer_state import states_in
from training.parameters import OPTIMIZER_PREFIX, stored_parameters


@dataclass(frozen=True)
class Plan:
    """A reshape that is about to happen.

    Args:
        source: Open; with resized embeddings where the layout asks for other padding.
        target: What writes it.
        caster: Of the weights; shared with the target.
        dropped: What the target has no place for, one line each.
        notes: What else the user should know.
    """

    source: Checkpoint
    target: NativeTarget | HuggingFaceTarget | MegatronTarget
    caster: Caster
    dropped: tuple[str, ...]
    notes: tuple[str, ...]


def make_plan(source: Checkpoint, settings: ReshapeConfig) -> Plan:
    """Decide what to write.

    Raises:
        ConfigError: The layout cannot cut the model, or no Hugging Face architecture computes it.
    """
    caster = Caster(None if settings.dtype == "keep" else DTYPES[settings.dtype])
    source, model = _with_vocabulary(source, settings.vocab_size)
    if settings.to == "huggingface":
        return _huggingface_plan(source, settings, caster, model)
    layout, notes = _layout(source, settings)
    model, more = _padded(model, layout)
    source = _resized(source, model)
    has_optimizer = source.info.has_optimizer and settings.optimizer
    dropped = ("optimizer state (optimizer: false)",) if source.info.has_optimizer and not has_optimizer else ()
    target: NativeTarget | MegatronTarget
    if settings.to == "megatron":
        more = [*more, "left behind: what Megatron-LM's own arguments hold beyond the model and the position"]
        target = MegatronTarget(source, caster, model, layout, has_optimizer=has_optimizer)
    else:
        target = NativeTarget(source, caster, model, layout, has_optimizer=has_optimizer)
    return Plan(source, target, caster, dropped, (*source.notes, *notes, *more))


def _with_vocabulary(source: Checkpoint, tokens: int | None) -> tuple[Checkpoint, ModelConfig]:
    """Give the model another number of tokens."""
    model = model_of(source.info, source.path)
    if tokens is None or tokens == model.vocab_size:
        return source, model
    before = model.vocab_size or 0
    changed = model.model_copy(update={"vocab_size": tokens})
    note = (
        f"the vocabulary is cut from {before} to {tokens} tokens; the others take no part in the softmax any more"
        if tokens < before
        else f"the vocabulary grows from {before} to {tokens} tokens; their rows are zeros, and zero logits take part "
        "in the softmax"
    )
    # Rows follow the model's rule for padding, so that what is linked and what is read agree.
    info = replace(source.info, model=changed.model_dump(mode="json"))
    source = replace(source, info=info, notes=(*source.notes, note))
    return _resized(source, changed, kept_rows=min(before, tokens)), changed


def _huggingface_plan(source: Checkpoint, settings: ReshapeConfig, caster: Caster, model: ModelConfig) -> Plan:
    dropped = []
    if source.info.has_optimizer:
        dropped.append("optimizer state (Hugging Face files have no place for it)")
    if padding := model.padded_vocab_size - (model.vocab_size or 0):
        dropped.append(f"{padding} padding rows of the vocabulary (they never get probability)")
    return Plan(source, HuggingFaceTarget(source, caster, settings.shard_bytes), caster, tuple(dropped), source.notes)


def _layout(source: Checkpoint, settings: ReshapeConfig) -> tuple[LayoutConfig, list[str]]:
    """The source's layout with other degrees; how data-parallel ranks share stays, where it is possible."""
    degrees = {
        "tensor_parallel": settings.tensor_parallel,
        "pipeline_parallel": settings.pipeline_parallel,
        "data_parallel": settings.data_parallel,
        # Sequences and experts are shared by ranks that compute; on the disk other ranks hold as much.
        "context_parallel": 1,
        "expert_parallel": 1,
        "shard_ranks": None,
    }
    try:
        return LayoutConfig.model_validate({**source.info.layout, **degrees}), []
    except ValidationError:
        notes = [f"layout.shard {source.info.layout.get('shard')} does not go with these degrees; optimizer is used"]
        return LayoutConfig.model_validate(degrees), notes


def _padded(model: ModelConfig, layout: LayoutConfig) -> tuple[ModelConfig, list[str]]:
    """Check the layout, and pad the vocabulary anew if its rows cannot be cut evenly."""
    rows, tp = model.padded_vocab_size, layout.tensor_parallel
    notes = []
    if rows % tp:
        model = model.model_copy(update={"vocab_multiple": math.lcm(model.vocab_multiple, tp)})
        notes.append(
            f"the vocabulary is padded to {model.padded_vocab_size} rows (before: {rows}), so that tensor_parallel "
            f"{tp} divides them; padding never gets probability, so nothing that the model computes changes"
        )
    try:
        check_layout(model, layout)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return model, notes


def _resized(source: Checkpoint, model: ModelConfig, *, kept_rows: int | None = None) -> Checkpoint:
    shapes = {name: shape for name, (shape, _) in stored_parameters(model).items()}
    if shapes == dict(source.info.parameters) and kept_rows is None:
        return source
    for name in list(shapes):
        shapes |= {
            f"{OPTIMIZER_PREFIX}{name}.{state}": shapes[name]
            for state in states_in(source.info.extra, name, shapes[name])
        }
    tables = (name for name in shapes if name.removeprefix(OPTIMIZER_PREFIX).startswith(("embedding.word.", "output.")))
    kept = {} if kept_rows is None else dict.fromkeys(tables, kept_rows)
    info = replace(source.info, parameters={name: shapes[name] for name in source.info.parameters})
    return replace(source, info=info, tensors=derive_resized(source.tensors, shapes, kept_rows=kept))


def dropped_and_kept(plan: Plan) -> dict[str, Any]:
    """What is lost and what is carried over, for screens and manifests."""
    info = plan.source.info
    kept = ["weights", f"step {info.step}", f"{info.consumed_samples} consumed samples"]
    if not isinstance(plan.target, HuggingFaceTarget) and plan.target.has_optimizer:
        kept.append("optimizer state")
    return {"kept": kept, "dropped": list(plan.dropped), "notes": list(plan.notes)}
