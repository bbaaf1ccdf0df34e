"""Token files that other programs wrote, as one description: where the tokens lie, and where sequences end.

| written by | files | what is odd about it |
|---|---|---|
| Megatron-LM, NeMo, GPT-NeoX (mmap), datatrove | `.bin`, `.idx` "MMIDIDX" | nothing |
| GPT-NeoX's merge | the same | its document bounds end early: each sequence beyond them is a document |
| GPT-NeoX (lazy, cached) | `.bin`, `.idx` "TNTIDX" | 64-bit sizes; offsets in elements |
| datatrove | `.ds`, `.ds.index`, `.ds.metadata` | the index holds the ends of documents; ids of 2 or 4 bytes |

datatrove's `.ds` with 4 bytes holds unsigned ids; as long as the highest fits, they are the same
bytes as Megatron's int32.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.errors import ConfigError, InputError
from preprocessing.dataset.indexed_dataset import (
    DTYPES,
    MAX_SEQUENCE_TOKENS,
    pair_prefix,
    pointer_problems,
    read_raw_index,
)

TNT_MAGIC = b"TNTIDX\x00\x00"
_TNT_HEADER = struct.Struct("<8s6Q")  # magic, version, type code, item size, arrays, sequences, document bounds
TOKEN_TYPES = ("<u1", "<i2", "<i4", "<u2", "<i8")


@dataclass(frozen=True)
class ForeignPair:
    """One file of tokens that another program wrote.

    Args:
        name: For messages and as the source of its documents.
        form: What was found, in words.
        data: File that holds nothing but the tokens.
        dtype: Of one token.
        lengths: (sequences,) tokens of each.
        bounds: (documents + 1,) first sequence of each document, and the number of sequences.
        notes: What a user should know of it.
    """

    name: str
    form: str
    data: Path
    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.int64]
    notes: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


def find_foreign(path: Path) -> list[Path]:
    """List what can be imported at a path: `.idx` and `.ds` files, sorted by name in a folder.

    Raises:
        ConfigError: There is nothing of that kind.
    """
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in (".idx", ".ds") and file.is_file())
    elif path.suffix == ".ds":
        found = [path]
    else:
        prefix = pair_prefix(path)
        found = [prefix.with_name(f"{prefix.name}.idx")]
    missing = next((file for file in found if not file.is_file()), None)
    if missing is not None:
        raise ConfigError(f"import.sources: there is no file {missing}. Name prefixes, .ds files or folders of them.")
    if not found:
        raise ConfigError(f"import.sources: the folder {path} holds no .idx or .ds file.")
    return found


def read_foreign(path: Path) -> ForeignPair:
    """Read the index of one dataset that another program wrote.

    Raises:
        InputError: It is damaged, of no known form, or holds numbers that are no token ids.
    """
    try:
        pair = _reader(path)(path)
        found = pair.data.stat().st_size
    except OSError as error:
        raise InputError(f"{error.filename or path}: cannot be read ({error.strerror or error}).") from error
    if pair.dtype.str.replace("|", "<") not in TOKEN_TYPES:
        raise InputError(f"{path}: holds {pair.dtype.name} numbers, which are no token ids (rewards, or other data).")
    wanted = pair.num_tokens * pair.dtype.itemsize
    if found != wanted:
        what = "it is truncated" if found < wanted else "they do not belong together"
        raise InputError(f"{pair.data}: holds {found} bytes where {path.name} lists {wanted}; {what}.")
    bounds = pair.bounds
    if not len(bounds):
        raise InputError(f"{path}: has no document bounds at all; it is damaged.")
    if bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] != len(pair.lengths):
        raise InputError(f"{path}: its document bounds do not rise from 0 to {len(pair.lengths)}; it is damaged.")
    return pair


def _reader(path: Path) -> Callable[[Path], ForeignPair]:
    if path.suffix == ".ds":
        return _read_datatrove
    with path.open("rb") as file:
        return _read_lazy if file.read(len(TNT_MAGIC)) == TNT_MAGIC else _read_mmap


def _read_mmap(path: Path) -> ForeignPair:
    raw = read_raw_index(path)
    if raw.has_modes:
        raise InputError(f"{path}: a multimodal dataset (one mode a sequence), which is not read.")
    bounds, lengths = np.array(raw.document_bounds), np.array(raw.lengths)
    notes: tuple[str, ...] = ()
    form = "MMIDIDX"
    last = int(bounds[-1]) if len(bounds) else 0
    if last < len(lengths):  # as GPT-NeoX's merge_file_ leaves it
        missing = len(lengths) - last
        notes = (
            f"its document bounds end at sequence {last} of {len(lengths)}, as GPT-NeoX's merge leaves them: the "
            f"{missing} sequences beyond are taken as a document each",
        )
        form = "MMIDIDX, merged by GPT-NeoX"
        known = bounds if len(bounds) else np.zeros(1, np.int64)
        bounds = np.concatenate([known, np.arange(last + 1, len(lengths) + 1, dtype=np.int64)])
    # Sequences must follow each other in the file, as every writer of this format lays them.
    for problem in pointer_problems(path, lengths, raw.pointers, raw.dtype.itemsize):
        raise InputError(f"{problem}.")
    return ForeignPair(path.stem, form, path.with_suffix(".bin"), raw.dtype, lengths, bounds, notes)


def _read_lazy(path: Path) -> ForeignPair:
    data = path.read_bytes()
    if len(data) < _TNT_HEADER.size:
        raise InputError(f"{path}: has {len(data)} bytes, less than its header; it is truncated.")
    _, version, code, itemsize, arrays, sequences, bounds = _TNT_HEADER.unpack_from(data)
    wanted = _TNT_HEADER.size + 8 * (2 * (arrays + 1) + sequences + bounds)
    if version != 1 or code not in DTYPES or DTYPES[code].itemsize != itemsize:
        raise InputError(f"{path}: has version {version}, token type {code} of {itemsize} bytes; not known.")
    if len(data) != wanted:
        raise InputError(f"{path}: has {len(data)} bytes where its header needs {wanted}; it is truncated or damaged.")
    numbers = np.frombuffer(data, dtype="<i8", offset=_TNT_HEADER.size)
    offsets = numbers[arrays + 1 : 2 * (arrays + 1)]
    sizes = numbers[2 * (arrays + 1) : 2 * (arrays + 1) + sequences]
    if len(sizes) and (int(sizes.min()) < 0 or int(sizes.max()) > MAX_SEQUENCE_TOKENS):
        raise InputError(f"{path}: a sequence of {int(sizes.max())} tokens; the format of .idx ends at 2^31 - 1.")
    if arrays != sequences or (np.diff(offsets) != sizes).any():
        raise InputError(f"{path}: its offsets and sizes contradict each other; it is damaged.")
    kept = np.array(numbers[2 * (arrays + 1) + sequences :])
    return ForeignPair(
        path.stem, "TNTIDX (lazy or cached)", path.with_suffix(".bin"), DTYPES[code], sizes.astype(np.int32), kept
    )


def _read_datatrove(path: Path) -> ForeignPair:
    index, metadata = (path.with_name(f"{path.name}{suffix}") for suffix in (".index", ".metadata"))
    if not index.is_file():
        raise InputError(f"{index}: there is no such file; datatrove's .ds needs it.")
    ends = np.fromfile(index, dtype="<u8").astype(np.int64)
    if index.stat().st_size % 8:
        raise InputError(f"{index}: its size is no multiple of 8 bytes; it is truncated.")
    size = _datatrove_token_size(path, metadata, int(ends[-1]) if len(ends) else 0)
    lengths = np.diff(ends, prepend=0)
    if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > MAX_SEQUENCE_TOKENS):
        raise InputError(f"{index}: its ends of documents do not rise, or one document has more than 2^31 - 1 tokens.")
    notes = ("its .loss file is left out",) if path.with_name(f"{path.name}.loss").is_file() else ()
    dtype = np.dtype("<u2" if size == 2 else "<i4")
    bounds = np.arange(len(lengths) + 1, dtype=np.int64)
    return ForeignPair(path.stem, "datatrove .ds", path, dtype, lengths.astype(np.int32), bounds, notes)


def _datatrove_token_size(path: Path, metadata: Path, num_tokens: int) -> int:
    """Return the bytes of a token: what `.metadata` says, else what the sizes say."""
    if metadata.is_file():
        _, _, size = metadata.read_text(encoding="utf-8", errors="replace").partition("\n")[0].rpartition("|")
        if size in ("2", "4"):
            return int(size)
        raise InputError(f"{metadata}: says a token has {size!r} bytes; 2 and 4 are known.")
    size_bytes = path.stat().st_size
    if num_tokens and size_bytes in (2 * num_tokens, 4 * num_tokens):
        return size_bytes // num_tokens
    raise InputError(f"{path}: holds {size_bytes} bytes, which is neither 2 nor 4 for each of {num_tokens} tokens.")
