"""Opens plain folders of `torch.distributed.checkpoint`, and safetensors shards of its Hugging Face writer.

Such a folder says of what shape its tensors are, and not of what model. So two things are needed: the `config.json`
of the Hugging Face model, beside the checkpoint or one folder above, and tensors with that model's names, under any
prefix.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError, InputError
from contracts.json_text import parse_json
from conversion.assembled import AssembledCatalogue, Part
from conversion.catalogue import Catalogue, Checkpoint, Shape, TensorEntry
from conversion.huggingface import open_tensors
from conversion.huggingface_architecture import architecture_of
from conversion.huggingface_files import CONFIG, read_json
from conversion.huggingface_names import links_of
from conversion.huggingface_reading import from_huggingface
from conversion.native import NativeCatalogue
from conversion.safetensors_files import StoredTensor, read_header
from conversion.torch_files import StoredTensor as PlacedTensor
from conversion.views import View, ViewCatalogue
from training.step_folders import list_checkpoints

_SHARDS = "shard-*.safetensors"
_OFFSETS = "DCP_SHARDING_INFO"
_NO_WEIGHT = re.compile(r"^(?:optim\w*|train_state|lr_scheduler|dataloader|rng_state|scheduler)\b")
_WRAPPERS = re.compile(r"(?:_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")


def open_dcp(path: Path, step: int | None) -> Checkpoint:
    """Open a folder of `torch.distributed.checkpoint`; its optimizer's state is left behind.

    Args:
        path: It, or a folder of several (`step-N`).
        step: Which of several; None takes the newest.

    Raises:
        ConfigError: There is none of that step.
        InputError: It is damaged, has no `config.json`, or has tensors of other names than that model's.
    """
    folder = _folder(path, step)
    source: Catalogue = _shards(folder) if _is_sharded(folder) else NativeCatalogue(folder)
    try:
        config_path = _config(folder)
        weights, aside = _weights(folder, source, config_path)

        def catalogue_of(stored: Mapping[str, StoredTensor]) -> Catalogue:
            views = {
                name: [
                    View(
                        (0,) * len(item.entry.shape),
                        item.entry.shape,
                        item.entry.name,
                        (),
                        (0,) * len(item.entry.shape),
                    )
                ]
                for name, item in stored.items()
            }
            return ViewCatalogue(folder, source, views, {name: item.entry.shape for name, item in stored.items()})

        found = open_tensors(folder, config_path, weights, {}, catalogue_of)
    except BaseException:
        source.close()
        raise
    match = re.search(r"(\d+)$", folder.name) if folder.name.startswith("step-") else None
    info = replace(found.info, step=int(match[1]) if match else 0)
    notes = (*found.notes, f"config: {config_path}")
    if aside:
        notes += (f"left behind: {len(aside)} tensors that are no weights ({', '.join(aside[:2])}, ...)",)
    return Checkpoint(folder, "dcp", info, found.tensors, notes, describe(source))


def dcp_files(path: Path, step: int | None) -> dict[str, Path]:
    """Name the files of a checkpoint, for the digests of a stage that is given them by path."""
    folder = _folder(path, step)
    files = [folder / ".metadata", *folder.glob("*.distcp"), *folder.glob(_SHARDS)]
    return {CONFIG: _config(folder)} | {file.name: file for file in sorted(files) if file.is_file()}


def describe_dcp(path: Path) -> dict[str, Any]:
    """Return what a folder says of its tensors without the `config.json` of a model; {} where it is damaged."""
    try:
        folder = _folder(path, None)
        source: Catalogue = _shards(folder) if _is_sharded(folder) else NativeCatalogue(folder)
    except (ConfigError, InputError):
        return {}
    try:
        return {"stored": describe(source)}
    finally:
        source.close()


def describe(source: Catalogue) -> dict[str, Any]:
    """Return the number of stored tensors, their types, and the first names."""
    entries = source.entries
    return {
        "tensors": len(entries),
        "other_objects": len(getattr(source, "objects", ())),
        "types": ", ".join(sorted({str(entry.dtype).removeprefix("torch.") for entry in entries.values()})),
        "names": ", ".join(list(entries)[:4]) + (", ..." if len(entries) > 4 else ""),
    }


def _folder(path: Path, step: int | None) -> Path:
    if (path / ".metadata").is_file() or any(path.glob("*.distcp")) or _is_sharded(path):
        return path
    known = {item.step: item for item in list_checkpoints(path)}
    if not known or step not in (None, *known):
        raise ConfigError(f"step is {step}, and {path} has {', '.join(map(str, sorted(known))) or 'none'}.")
    usable = [item for item in known.values() if item.problem is None] or list(known.values())
    return known[step].path if step is not None else max(usable, key=lambda item: item.step).path


def _is_sharded(folder: Path) -> bool:
    return any(folder.glob(_SHARDS))


def _config(folder: Path) -> Path:
    for place in (folder / CONFIG, folder.parent / CONFIG):
        if place.is_file():
            return place
    raise InputError(
        f"{folder}: does not say of what model it is. Put the {CONFIG} of the Hugging Face model into it, or one "
        "folder above; its tensors must have the names of that model (any prefix)."
    )


def _weights(folder: Path, source: Catalogue, config_path: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Find the weights of the model; returns them by the names of Hugging Face, and the names of the other tensors.

    Raises:
        InputError: The model's embedding is not there under any prefix.
    """
    config = read_json(config_path)
    model = from_huggingface(config, str(config_path))
    table = next(
        link.foreign for link in links_of(model, architecture_of(model)) if link.canonical == "embedding.word.weight"
    )
    clean = {name: _WRAPPERS.sub("", name) for name in source.entries}
    ends = {table, table.removeprefix("transformer.")}
    prefixes = [
        name.removesuffix(end)
        for name in clean.values()
        for end in ends
        if not _NO_WEIGHT.match(name) and (name == end or name.endswith(f".{end}"))
    ]
    if not prefixes:
        some = ", ".join(list(clean)[:3])
        raise InputError(
            f"{folder}: has no tensor {table} under any prefix, which {config_path} calls for; its tensors ({some}, "
            "...) have names of another program. Save it under the names of Hugging Face."
        )
    prefix = min(prefixes, key=len)
    weights, aside = {}, []
    for key, entry in source.entries.items():
        name = clean[key]
        if not name.startswith(prefix) or _NO_WEIGHT.match(name):
            aside.append(key)
            continue
        weights[name.removeprefix(prefix)] = StoredTensor(TensorEntry(key, entry.shape, entry.dtype), folder, 0)
    return weights, aside


def _shards(folder: Path) -> AssembledCatalogue:
    """Put the shards of the Hugging Face writer together.

    Raises:
        InputError: A file is damaged, does not say where its shards belong, or a shard is missing.
    """
    parts: dict[str, list[Part]] = {}
    for path in sorted(folder.glob(_SHARDS)):
        stored, texts = read_header(path)
        try:
            offsets = parse_json(texts[_OFFSETS])
            firsts: dict[str, Shape] = {name: tuple(map(int, offsets[name]["saved_offsets"])) for name in stored}
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: its header does not say where its shards belong ({error}).") from error
        for name, item in stored.items():
            known = parts.setdefault(name, [])
            if any(part.first == firsts[name] for part in known):
                raise InputError(f"{path}: its part of tensor {name} is also in another file.")
            known.append(Part(firsts[name], PlacedTensor(path, item.start, item.entry.dtype, item.entry.shape)))
    shapes = {
        name: tuple(max(b for _, b in d) for d in zip(*(p.box for p in found), strict=True))
        for name, found in parts.items()
    }
    return AssembledCatalogue(folder, parts, shapes)
