"""Hugging Face model folders: `config.json`, safetensors (one file or several with an index), tokenizer files."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contracts.errors import InputError
from contracts.json_text import parse_json
from conversion.catalogue import Catalogue, Checkpoint, equal_bits, row_blocks
from conversion.huggingface_architecture import architecture_of
from conversion.huggingface_files import CONFIG, INDEX, read_json, weight_files, weight_map
from conversion.huggingface_names import links_of
from conversion.huggingface_reading import from_huggingface
from conversion.linked_rows import Link, derive_canonical
from conversion.safetensors_files import (
    SafetensorsCatalogue,
    StoredTensor,
    read_header,
)
from training.config import LayoutConfig, ModelConfig
from training.parameters import stored_parameters
from training.step_folders import CheckpointInfo

# Masks and tables that old releases stored among the weights; they follow from the config.
_NO_WEIGHTS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".rotary_emb.inv_freq",
    ".embeddings.position_ids",
    # A pooled first token that no head reads.
    "roberta.pooler.dense.weight",
    "roberta.pooler.dense.bias",
    "bert.pooler.dense.weight",
    "bert.pooler.dense.bias",
    # T5's first release has the relative positions of the cross attention, which it never reads.
    ".EncDecAttention.relative_attention_bias.weight",
)
_OUTPUTS = ("lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight", "lm_head.decoder.weight")
_PAIR_HEAD = "cls.seq_relationship.weight"
_GREEK = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$")
_LATIN = {"gamma": "weight", "beta": "bias"}
_COPIES = {
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.bias": "lm_head.bias",
}
OWN_KEY = "shardline"


def open_huggingface(folder: Path) -> Checkpoint:
    """Open a model folder; every header is read and every name and shape checked, no data.

    Raises:
        InputError: The architecture is not supported, a file is missing or damaged, or a tensor is
            missing, unexpected or of another shape than `config.json` says.
    """
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder}: has weights and no {CONFIG}, which says of what model they are. Put it there.")
    return open_tensors(folder, folder / CONFIG, *_stored_tensors(folder), SafetensorsCatalogue)


def open_tensors(
    folder: Path,
    config_path: Path,
    stored: Mapping[str, StoredTensor],
    metadata: Mapping[str, str],
    catalogue_of: Callable[[Mapping[str, StoredTensor]], Catalogue],
) -> Checkpoint:
    """Open tensors that have the names of Hugging Face, wherever they lie.

    Args:
        config_path: Of the model.
        stored: Every tensor by name.
        metadata: Free texts of the files.
        catalogue_of: Makes some of them readable.

    Raises:
        InputError: As `open_huggingface`.
    """
    config = read_json(config_path)
    model = from_huggingface(config, str(config_path))
    if model.pair_head and _PAIR_HEAD not in stored:
        model = model.model_copy(update={"pair_head": False})
    own = _own_facts(metadata, model)
    model = own.get("model", model)
    architecture = architecture_of(model)
    stored = _with_usual_names(stored, architecture)
    links = links_of(model, architecture)
    weights, notes = _check_names(folder, stored, links, model)
    copies = _copies(stored, links, model)
    source = catalogue_of(weights | {name: stored[name] for name in copies})
    _check_copies(folder, source, copies)
    shapes = {name: shape for name, (shape, _) in stored_parameters(model).items()}
    info = CheckpointInfo(
        step=own.get("step", 0),
        consumed_samples=own.get("consumed_samples", 0),
        seq_length=own.get("seq_length", model.max_position_embeddings),
        model=model.model_dump(mode="json"),
        layout=LayoutConfig().model_dump(mode="json"),
        has_optimizer=False,
        parameters=shapes,
        dtype=_common_dtype(source),
        extra={"token_ids": {key: config[key] for key in _TOKEN_IDS if config.get(key) is not None}},
    )
    return Checkpoint(folder, "huggingface", info, derive_canonical(source, links, shapes), notes)


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _stored_tensors(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    files = weight_files(folder)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InputError(f"{folder}: {', '.join(missing)} of {INDEX} is missing. Fetch it again.")
    stored: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        found, texts = read_header(file)
        metadata |= texts
        for name, item in found.items():
            if name in stored:
                raise InputError(f"{file}: tensor {name} is also in {stored[name].path.name}.")
            stored[name] = item
    if (folder / INDEX).is_file():
        for name, file_name in weight_map(folder).items():
            if name not in stored or stored[name].path.name != file_name:
                raise InputError(f"{folder / INDEX}: places tensor {name} in {file_name}, where it is not.")
    return stored, metadata


def _with_usual_names(stored: Mapping[str, StoredTensor], architecture: str) -> dict[str, StoredTensor]:
    """Name tensors as today: GPT-2 saved without its head lacks a prefix, and norms of BERT had Greek names."""
    if architecture == "bert":
        return {_GREEK.sub(lambda found: _LATIN[found[0]], name): item for name, item in stored.items()}
    if architecture != "gpt2" or "wte.weight" not in stored:
        return dict(stored)
    return {name if name == "lm_head.weight" else f"transformer.{name}": item for name, item in stored.items()}


def _check_names(
    folder: Path, stored: Mapping[str, StoredTensor], links: list[Link], model: ModelConfig
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    expected = {link.foreign: link.foreign_shape for link in links}
    missing = [name for name in expected if name not in stored]
    if missing:
        raise InputError(f"{folder}: has no tensor {_some(missing)}, which its {CONFIG} calls for.")
    aside = [name for name in stored if name not in expected and name.endswith(_NO_WEIGHTS)]
    copies = _copies(stored, links, model)
    unexpected = [name for name in stored if name not in expected and name not in aside and name not in copies]
    if unexpected:
        raise InputError(f"{folder}: tensor {_some(unexpected)} has no place in a model as its {CONFIG} describes.")
    for name, shape in expected.items():
        item = stored[name]
        if item.entry.shape != shape:
            raise InputError(
                f"{item.path}: tensor {name} has the shape {list(item.entry.shape)}, and {CONFIG} calls for "
                f"{list(shape)}."
            )
        if not item.entry.dtype.is_floating_point:
            raise InputError(
                f"{item.path}: tensor {name} is {item.entry.dtype}, and weights are floating-point numbers."
            )
    notes = (f"left aside, since they follow from the config: {_some(aside)}",) if aside else ()
    return {name: stored[name] for name in expected}, notes


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _copies(stored: Mapping[str, StoredTensor], links: list[Link], model: ModelConfig) -> dict[str, str]:
    """Name the stored tensors that only repeat another one, and which."""
    foreign = {link.foreign for link in links}
    table = next(link.foreign for link in links if link.canonical == "embedding.word.weight")
    possible = {name: table for name in _OUTPUTS if model.tied_embeddings} | _COPIES
    return {
        name: original
        for name, original in possible.items()
        if name in stored and name not in foreign and original in foreign
    }


def _check_copies(folder: Path, source: Catalogue, copies: Mapping[str, str]) -> None:
    for name, original in copies.items():
        copy, first = source.entries[name], source.entries[original]
        if copy.shape == first.shape and copy.dtype == first.dtype:
            blocks = row_blocks(copy.box, copy.dtype.itemsize)
            if all(equal_bits(source.read(name, box), source.read(original, box)) for box in blocks):
                continue
        cure = "Set tie_word_embeddings: false there if the model has an output matrix of its own."
        raise InputError(
            f"{folder}: {name} differs from {original}, and {CONFIG} says that they are tied. "
            f"{cure if name in _OUTPUTS else 'Fetch the folder again.'}"
        )


def _common_dtype(source: Catalogue) -> str:
    found = sorted({str(entry.dtype).removeprefix("torch.") for entry in source.entries.values()})
    return "+".join(found)


def _own_facts(metadata: Mapping[str, str], model: ModelConfig) -> dict[str, Any]:
    """Take back what an export of ours wrote beside the weights, if the config still says the same model."""
    try:
        facts = parse_json(metadata.get(OWN_KEY, "{}"))
        exported = ModelConfig.model_validate(facts.pop("model"))
        counts = {key: int(facts[key]) for key in ("step", "consumed_samples", "seq_length")}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    same = {"vocab_multiple", "init_std", "dropout", "backend", "family"}
    if exported.model_dump(exclude=same) != model.model_dump(exclude=same) or min(counts.values()) < 0:
        return {}
    return {**counts, "model": exported}
