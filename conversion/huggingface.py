"""Hugging Face model folders: `config.json`, safetensors (one file or several with an index), tokenizer files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from contracts.errors import InputError
from contracts.files import sync, write_atomically
from contracts.progress import Progress
from conversion.casting import Caster
from conversion.catalogue import Catalogue, Checkpoint, TensorEntry, equal_bits, row_blocks
from conversion.huggingface_config import architecture_of, from_huggingface, to_huggingface
from conversion.huggingface_names import links_of
from conversion.linked_rows import Link, derive_canonical, derive_foreign
from conversion.safetensors_files import (
    SafetensorsCatalogue,
    StoredTensor,
    header_bytes,
    read_header,
    split_into_files,
    write_file,
)
from training.config import LayoutConfig, ModelConfig
from training.parameters import stored_parameters
from training.step_folders import CheckpointInfo, file_digest

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Masks and tables that old releases stored among the weights; they follow from the config.
_NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_OWN_KEY = "shardline"


def open_huggingface(folder: Path) -> Checkpoint:
    """Open a model folder; every header is read and every name and shape checked, no data.

    Raises:
        InputError: The architecture is not supported, a file is missing or damaged, or a tensor is
            missing, unexpected or of another shape than `config.json` says.
    """
    config = _read_json(folder / CONFIG)
    model = from_huggingface(config, str(folder / CONFIG))
    stored, metadata = _stored_tensors(folder)
    own = _own_facts(metadata, model)
    model = own.get("model", model)
    architecture = architecture_of(model)
    links = links_of(model, architecture)
    stored = _with_prefix(stored, architecture)
    weights, notes = _check_names(folder, stored, links, model)
    source = SafetensorsCatalogue(weights | _tied_copies(stored, model))
    _check_tied(folder, source, model)
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


def weight_files(folder: Path) -> list[Path]:
    """List the files that hold the weights; the index is checked, the files are not opened.

    Raises:
        InputError: The index is damaged or leads out of the folder, or there are no safetensors files.
    """
    if (folder / INDEX).is_file():
        return sorted({folder / name for name in _weight_map(folder).values()})
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.h5")) or any(folder.glob("*.msgpack")):
        raise InputError(
            f"{folder}: holds weights in another form than safetensors. Save it anew with "
            "save_pretrained(..., safe_serialization=True) of transformers."
        )
    raise InputError(f"{folder}: there is neither {SINGLE} nor {INDEX}; the weights are missing.")


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    found = _read_json(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise InputError(f"{path}: holds no weight_map.")
    for tensor, name in found.items():
        if not isinstance(name, str) or PurePosixPath(name).name != name or "\\" in name or name in ("", "..", "."):
            raise InputError(
                f"{path}: places tensor {tensor} in {name!r}, which is no plain file name; a file outside of the "
                "folder is never read."
            )
    return found


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
        for name, file_name in _weight_map(folder).items():
            if name not in stored or stored[name].path.name != file_name:
                raise InputError(f"{folder / INDEX}: places tensor {name} in {file_name}, where it is not.")
    return stored, metadata


def _with_prefix(stored: Mapping[str, StoredTensor], architecture: str) -> dict[str, StoredTensor]:
    """GPT-2 saved without its head has no `transformer.` before its names."""
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
    copies = _tied_copies(stored, model)
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


def _tied_copies(stored: Mapping[str, StoredTensor], model: ModelConfig) -> dict[str, StoredTensor]:
    name = "lm_head.weight"
    return {name: stored[name]} if model.tied_embeddings and name in stored else {}


def _check_tied(folder: Path, source: SafetensorsCatalogue, model: ModelConfig) -> None:
    if not model.tied_embeddings or "lm_head.weight" not in source.entries:
        return
    table = next(n for n in source.entries if n.endswith(("wte.weight", "embed_tokens.weight")))
    copy, original = source.entries["lm_head.weight"], source.entries[table]
    if copy.shape == original.shape and copy.dtype == original.dtype:
        blocks = row_blocks(copy.box, copy.dtype.itemsize)
        if all(equal_bits(source.read("lm_head.weight", box), source.read(table, box)) for box in blocks):
            return
    raise InputError(
        f"{folder}: lm_head.weight differs from {table}, and {CONFIG} says that they are tied. "
        "Set tie_word_embeddings: false there if the model has an output matrix of its own."
    )


def _common_dtype(source: Catalogue) -> str:
    found = sorted({str(entry.dtype).removeprefix("torch.") for entry in source.entries.values()})
    return "+".join(found)


def _own_facts(metadata: Mapping[str, str], model: ModelConfig) -> dict[str, Any]:
    """Take back what an export of ours wrote beside the weights, if the config still says the same model."""
    try:
        facts = json.loads(metadata.get(_OWN_KEY, "{}"))
        exported = ModelConfig.model_validate(facts.pop("model"))
        counts = {key: int(facts[key]) for key in ("step", "consumed_samples", "seq_length")}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    same = {"vocab_multiple", "init_std", "dropout", "backend", "family"}
    if exported.model_dump(exclude=same) != model.model_dump(exclude=same) or min(counts.values()) < 0:
        return {}
    return {**counts, "model": exported}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise InputError(f"{path}: is no JSON ({error}).") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds no JSON object.")
    return data


class HuggingFaceTarget:
    """What an export will write: decided from descriptions alone, before any byte is read.

    Args:
        source: An open checkpoint.
        caster: Says the types of the written weights.
        shard_bytes: Largest file, unless a single tensor is larger.

    Raises:
        ConfigError: No Hugging Face architecture computes the model.
    """

    def __init__(self, source: Checkpoint, caster: Caster, shard_bytes: int) -> None:
        self.source, self.caster = source, caster
        self.model = ModelConfig.model_validate(source.info.model)
        self.architecture = architecture_of(self.model)
        self.tensors = derive_foreign(source.tensors, links_of(self.model, self.architecture))
        entries = {
            name: TensorEntry(name, entry.shape, caster.dtype_of(name, entry.dtype))
            for name, entry in self.tensors.entries.items()
        }
        parts = split_into_files(entries, shard_bytes)
        total = len(parts)
        self.files: dict[str, dict[str, TensorEntry]] = (
            {SINGLE: parts[0]}
            if total == 1
            else {f"model-{n:05d}-of-{total:05d}.safetensors": part for n, part in enumerate(parts, 1)}
        )

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for part in self.files.values() for entry in part.values())

    @property
    def peak_bytes(self) -> int:
        """The most memory that tensors take while they are written."""
        return max(self._block_bytes(entry) for part in self.files.values() for entry in part.values())

    def _block_bytes(self, entry: TensorEntry) -> int:
        blocks = list(self._blocks(entry))
        return 2 * max(entry.size_bytes // max(1, len(blocks)), 1)

    def _blocks(self, entry: TensorEntry) -> Iterator[Any]:
        # A block of a transposed matrix is a block of columns, for which the whole source is read.
        if self.architecture == "gpt2" and len(entry.shape) > 1 and ".h." in entry.name:
            return iter([entry.box])
        return row_blocks(entry.box, entry.dtype.itemsize)

    def _pieces(self, entry: TensorEntry) -> Iterator[Tensor]:
        for box in self._blocks(entry):
            yield self.caster(entry.name, self.tensors.read(entry.name, box))

    def write(
        self, folder: Path, *, token_ids: Mapping[str, Any], progress: Progress, is_resumed: bool = False
    ) -> dict[str, str]:
        """Write weights, index and config; files that an unfinished build left whole are kept.

        Returns:
            sha256 of each file of weights.
        """
        info = self.source.info
        own = {
            "step": info.step,
            "consumed_samples": info.consumed_samples,
            "seq_length": info.seq_length,
            "model": dict(info.model),
        }
        metadata = {"format": "pt", _OWN_KEY: json.dumps(own)}
        digests: dict[str, str] = {}
        for n, (name, entries) in enumerate(self.files.items(), 1):
            path = folder / name
            if is_resumed and _is_whole(path, header_bytes(entries, metadata), entries):
                digests[name] = file_digest(path)
            else:
                digests[name] = write_file(path, entries, metadata, self._pieces)
            progress.update(n, total=len(self.files), unit="files")
        if len(self.files) > 1:
            index = {
                "metadata": {"total_size": self.size_bytes},
                "weight_map": {tensor: name for name, entries in self.files.items() for tensor in entries},
            }
            write_atomically(folder / INDEX, json.dumps(index, indent=1) + "\n")
        written = sorted({str(e.dtype).removeprefix("torch.") for part in self.files.values() for e in part.values()})
        config = to_huggingface(self.model, dtype=written[-1] if len(written) > 1 else written[0], token_ids=token_ids)
        write_atomically(folder / CONFIG, json.dumps(config, indent=1) + "\n")
        sync(folder)
        return digests


def _is_whole(path: Path, header: bytes, entries: Mapping[str, TensorEntry]) -> bool:
    """Tell whether a file of an unfinished build is the one to be written; it got its name when it was whole."""
    if not path.is_file() or path.stat().st_size != len(header) + sum(e.size_bytes for e in entries.values()):
        return False
    with path.open("rb") as file:
        return file.read(len(header)) == header
