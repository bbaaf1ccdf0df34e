"""The `.bin`/`.idx` pair of Megatron-LM's `IndexedDataset`: writer and reader.

`.bin`: the tokens of all sequences, little-endian, no header. `.idx`, little-endian, no padding:

    offset        type     content
    0             9 bytes  b"MMIDIDX" and two zero bytes
    9             u64      version, 1
    17            u8       token type: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
    18            u64      S, number of sequences
    26            u64      D, number of documents + 1
    34            i32[S]   tokens of each sequence
    34 + 4 S      i64[S]   byte offset of each sequence in .bin
    34 + 12 S     i64[D]   first sequence of each document, and S at the end

A document may have several sequences, or none. Multimodal files add S bytes, which are ignored here.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from contracts.errors import ConfigError, InputError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_SEQUENCE_TOKENS = 2**31 - 1
CHUNK_SEQUENCES = 2**18  # handled at a time where memory must not grow with the dataset


@dataclass(frozen=True)
class PairCounts:
    """Sizes of one pair."""

    num_documents: int
    num_tokens: int


class PairWriter:
    """Writes one pair, one sequence per document.

    Tokens go to `.bin` as they come; the lengths (4 bytes a document) stay in memory until `finish`.
    Files carry a temporary name until then.

    Args:
        prefix: Path without `.bin`.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix = prefix
        self._dtype = dtype
        self._bin: BinaryIO = _temporary(prefix, ".bin").open("wb")
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._counts: list[npt.NDArray[np.int64]] | None = None  # None while every document is one sequence
        self.num_documents = 0
        self.num_tokens = 0

    def append(self, ids: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        """Write documents of one sequence: (tokens,) ids of all, and the (documents,) tokens of each."""
        self._write(ids, lengths)
        self.num_documents += len(lengths)
        if self._counts is not None:
            self._counts.append(np.ones(len(lengths), dtype=np.int64))

    def append_sequences(self, ids: npt.NDArray[Any], lengths: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> None:
        """Write documents of several sequences, or none.

        Args:
            ids: (tokens,) of all.
            lengths: (sequences,) tokens of each sequence.
            counts: (documents,) sequences of each document.
        """
        if self._counts is None:
            self._counts = [np.ones(self.num_documents, dtype=np.int64)]
        self._write(ids, lengths)
        self._counts.append(counts)
        self.num_documents += len(counts)

    def _write(self, ids: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        self._bin.write(np.ascontiguousarray(ids, dtype=self._dtype).data)
        self._lengths.append(lengths.astype(np.int32))
        self.num_tokens += len(ids)

    def _document_bounds(self, num_sequences: int) -> npt.NDArray[np.int64]:
        if self._counts is None:
            return np.arange(num_sequences + 1, dtype="<i8")
        return np.concatenate([np.zeros(1, "<i8"), np.cumsum(np.concatenate(self._counts), dtype="<i8")])

    def finish(self) -> PairCounts:
        """Write `.idx`, make both files durable, and give them their names (`.idx` last)."""
        lengths = np.concatenate([np.empty(0, np.int32), *self._lengths])
        self._bin.flush()
        os.fsync(self._bin.fileno())
        self._bin.close()
        _temporary(self._prefix, ".bin").replace(_with(self._prefix, ".bin"))
        write_index(_with(self._prefix, ".idx"), self._dtype, lengths, self._document_bounds(len(lengths)))
        return PairCounts(self.num_documents, self.num_tokens)

    def close(self) -> None:
        """Give up the pair; its temporary files are left to be overwritten."""
        self._bin.close()


def write_index(
    path: Path, dtype: np.dtype[Any], lengths: npt.NDArray[Any], document_bounds: npt.NDArray[np.int64]
) -> None:
    """Write an `.idx` under a temporary name, make it durable, and give it its name.

    Args:
        lengths: (sequences,) tokens of each sequence.
        document_bounds: (documents + 1,) first sequence of each document, and the number of sequences.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as index:
        index.write(index_header(dtype, len(lengths), len(document_bounds) - 1))
        index.write(lengths.astype("<i4").tobytes())
        index.write(sequence_pointers(lengths, dtype.itemsize).astype("<i8").tobytes())
        index.write(document_bounds.astype("<i8").tobytes())
        index.flush()
        os.fsync(index.fileno())
    temporary.replace(path)


def index_header(dtype: np.dtype[Any], num_sequences: int, num_documents: int) -> bytes:
    """Return the 34 bytes that an `.idx` begins with."""
    return _HEADER.pack(MAGIC, 1, _CODES[dtype], num_sequences, num_documents + 1)


def sequence_pointers(lengths: npt.NDArray[Any], itemsize: int) -> npt.NDArray[np.int64]:
    """Return the byte offset of each sequence: exclusive running sum of length x item size."""
    pointers = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    return pointers * itemsize


@dataclass(frozen=True)
class RawIndex:
    """What an `.idx` holds, memory-mapped and not yet judged.

    Args:
        lengths: (sequences,) tokens of each.
        pointers: (sequences,) byte offset of each in `.bin`.
        document_bounds: As in the file: (documents + 1,).
        has_modes: One more byte for each sequence follows, as in multimodal files.
    """

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    document_bounds: npt.NDArray[np.int64]
    has_modes: bool


def read_raw_index(path: Path) -> RawIndex:
    """Map an `.idx`.

    Raises:
        InputError: It is none, or its size is not what its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if not head.startswith(MAGIC):
        is_lazy = head.startswith(b"TNTIDX")
        legacy = " It is a GPT-NeoX lazy or cached index: `shardline import` reads it." if is_lazy else ""
        raise InputError(f"{path}: begins with {head[:9]!r}, not {MAGIC!r}: no index of this format.{legacy}")
    if len(head) < _HEADER.size:
        raise InputError(f"{path}: has {size} bytes, less than its header; it is truncated.")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(head)
    if version != 1 or code not in DTYPES:
        raise InputError(f"{path}: has version {version} and token type {code}; known are version 1, types 1-8.")
    wanted = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if size not in (wanted, wanted + num_sequences):  # the latter with multimodal modes
        raise InputError(f"{path}: has {size} bytes where its header needs {wanted}; it is truncated or damaged.")
    raw = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    ends = np.cumsum([_HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_bounds])
    lengths, pointers, bounds = (raw[ends[n] : ends[n + 1]] for n in range(3))
    return RawIndex(
        DTYPES[code], lengths.view("<i4"), pointers.view("<i8"), bounds.view("<i8"), num_sequences > 0 and size > wanted
    )


def pointer_problems(path: Path, lengths: npt.NDArray[np.int32], pointers: Any, itemsize: int) -> Iterator[str]:
    """Say whether sequences do not follow each other in `.bin`, as every writer lays them; in constant memory."""
    at = 0
    for start in range(0, len(lengths), CHUNK_SEQUENCES):
        chunk = np.array(lengths[start : start + CHUNK_SEQUENCES])
        if int(chunk.min()) < 0:
            yield f"{path}: sequence {start + int(chunk.argmin())} has a negative length"
            return
        differ = np.flatnonzero(pointers[start : start + CHUNK_SEQUENCES] != sequence_pointers(chunk, itemsize) + at)
        if len(differ):
            yield f"{path}: sequence pointers are wrong, first of sequence {start + int(differ[0])}"
            return
        at += int(chunk.sum(dtype=np.int64)) * itemsize


class IndexedDataset:
    """One pair, memory-mapped; also one written by Megatron-LM, GPT-NeoX or datatrove.

    Args:
        prefix: Path without `.bin` and `.idx`, or with either.

    Raises:
        ConfigError: A file of the pair is missing.
        InputError: The index is damaged, or the pair does not fit together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = pair_prefix(prefix)
        self.bin_path, self.idx_path = _with(self.prefix, ".bin"), _with(self.prefix, ".idx")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise ConfigError(f"{path}: there is no such file; a dataset is a pair of .bin and .idx.")
        with _reading(self.idx_path):
            self._read_index()
        num_tokens = int(self.lengths.sum(dtype=np.int64))
        wanted = num_tokens * self.dtype.itemsize
        found = self.bin_path.stat().st_size
        if found != wanted:
            what = "it is truncated" if found < wanted else "they do not belong together"
            raise InputError(
                f"{self.bin_path}: holds {found} bytes, but {self.idx_path.name} lists {num_tokens} tokens of "
                f"{self.dtype.itemsize} bytes = {wanted} bytes; {what}."
            )
        self.num_tokens = num_tokens
        # A plain view: each slice of a memmap object costs a microsecond more.
        self.tokens: npt.NDArray[Any] = (
            np.memmap(self.bin_path, dtype=self.dtype, mode="r").view(np.ndarray)
            if num_tokens
            else np.empty(0, self.dtype)
        )

    def _read_index(self) -> None:
        raw = read_raw_index(self.idx_path)
        self.dtype, self.has_modes = raw.dtype, raw.has_modes
        self.lengths, self.pointers, self.document_bounds = raw.lengths, raw.pointers, raw.document_bounds
        last = int(raw.document_bounds[-1]) if len(raw.document_bounds) else -1
        if last != len(raw.lengths):
            raise InputError(
                f"{self.idx_path}: its document index ends at sequence {last} of {len(raw.lengths)}. "
                "GPT-NeoX's merge writes such files; `shardline import` makes a whole dataset of it."
            )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_bounds) - 1

    def sequence(self, number: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Return the tokens of a sequence, or a part of them, as a view of the file."""
        size = int(self.lengths[number])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise ValueError(f"sequence {number} has {size} tokens; {offset} to {stop} were asked.")
        start = int(self.pointers[number]) // self.dtype.itemsize
        return self.tokens[start + offset : start + stop]

    def gather(
        self,
        numbers: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        stops: npt.NDArray[np.int64],
        out: npt.NDArray[Any],
    ) -> None:
        """Copy tokens of sequences `numbers`, from token `offsets` on, to `out[starts:stops]`; all (stretches,)."""
        tokens = self.tokens
        begins = self.pointers[numbers] // self.dtype.itemsize + offsets
        for begin, start, stop in zip(begins.tolist(), starts.tolist(), stops.tolist(), strict=True):
            out[start:stop] = tokens[begin : begin + stop - start]

    def document(self, number: int) -> npt.NDArray[Any]:
        """Return the tokens of a document, all its sequences."""
        first, last = int(self.document_bounds[number]), int(self.document_bounds[number + 1])
        return np.concatenate([self.tokens[:0], *(self.sequence(n) for n in range(first, last))])

    def last_tokens(self, count: int) -> npt.NDArray[np.int64]:
        """Return the last token of each of the first `count` documents; -1 of an empty one."""
        bounds = self.document_bounds[: count + 1].astype(np.int64)
        found = np.full(count, -1, dtype=np.int64)
        last = bounds[1:] - 1
        is_plain = bounds[1:] > bounds[:-1]
        is_plain[is_plain] = self.lengths[last[is_plain]] > 0
        chosen = last[is_plain]
        found[is_plain] = self.tokens[self.pointers[chosen] // self.dtype.itemsize + self.lengths[chosen] - 1]
        for number in np.flatnonzero(~is_plain):  # of no sequence, or whose last sequence is empty
            found[number] = next(iter(self.document(int(number))[-1:].tolist()), -1)
        return found

    def problems(self) -> Iterator[str]:
        """Say what is wrong with the index: pointers, lengths, document bounds; in constant memory."""
        yield from pointer_problems(self.idx_path, self.lengths, self.pointers, self.dtype.itemsize)
        last = 0
        for start in range(0, len(self.document_bounds), CHUNK_SEQUENCES):
            bounds = np.array(self.document_bounds[start : start + CHUNK_SEQUENCES])
            if (start == 0 and bounds[0] != 0) or bounds[0] < last or (np.diff(bounds) < 0).any():
                yield f"{self.idx_path}: document bounds do not rise from 0"
                return
            last = int(bounds[-1])


def pair_prefix(path: str | Path) -> Path:
    """Return the path of a pair without `.bin` or `.idx`."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _temporary(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(f"{prefix.name}{suffix}.tmp")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}).") from error
