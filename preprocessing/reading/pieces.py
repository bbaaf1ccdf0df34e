"""Pieces of files: stretches that can be read by themselves, and the blocks of each.

Plain files of lines are cut by bytes, zstd files of several frames by frames, Parquet files by
row groups. Whatever else there is, and whatever looks odd, is one piece and read as a stream, so
that damage is found where it is and hides nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from contracts.errors import RecordError
from preprocessing.reading.blocks import BLOCK_BYTES, LINE_BYTES, Block, Position
from preprocessing.reading.compression import detect_kind
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.lines import line_blocks
from preprocessing.reading.parquet import parquet_blocks, row_group_sizes
from preprocessing.reading.records import Record, RecordFormat, Reject, parse_block
from preprocessing.reading.source_file import SourceFile
from preprocessing.reading.zstd_frames import UnusualFrameError, frame_starts


@dataclass(frozen=True)
class Piece:
    """A stretch of one source file that can be read without reading what stands before it.

    Args:
        file: Number of the file in the list of source files.
        start, stop: Where it begins and ends (exclusive; None: with the file): bytes of a plain
            file of lines, bytes at which zstd frames begin, numbers of Parquet row groups.
        size_bytes: On disk, for balance and progress.
    """

    file: int
    start: int = 0
    stop: int | None = None
    size_bytes: int = 0


def cut_file(source: SourceFile, number: int, *, piece_bytes: int) -> list[Piece]:
    """Cut a file into pieces of about `piece_bytes` on disk; a function of the file alone.

    Args:
        number: Of the file in the list of source files.

    Raises:
        ConfigError: The file cannot be opened.
        InputError: The file is of no known type.
    """
    kind = detect_kind(source)
    size_bytes = source.size_bytes
    if size_bytes <= piece_bytes:
        return [Piece(number, size_bytes=size_bytes)]
    if kind == "plain":
        starts = list(range(0, size_bytes, piece_bytes))
        if size_bytes - starts[-1] < piece_bytes // 2:
            starts.pop()
        return _pieces_between(number, starts, size_bytes)
    if kind == "zstd":
        try:
            with source.open() as file:
                frames = frame_starts(file, size_bytes)
        except UnusualFrameError:
            frames = [0]
        return _pieces_between(number, _grouped(frames, piece_bytes), size_bytes)
    if kind == "parquet":
        return _pieces_of_row_groups(source, number, piece_bytes)
    return [Piece(number, size_bytes=size_bytes)]


def _pieces_between(number: int, starts: Sequence[int], size_bytes: int) -> list[Piece]:
    stops: list[int | None] = [*starts[1:], None]
    return [
        Piece(number, start, stop, (size_bytes if stop is None else stop) - start)
        for start, stop in zip(starts, stops, strict=True)
    ]


def _grouped(starts: Sequence[int], piece_bytes: int) -> list[int]:
    """Leave out starts, so that those left are `piece_bytes` or more apart."""
    kept = [0]
    for start in starts:
        if start - kept[-1] >= piece_bytes:
            kept.append(start)
    return kept


def _pieces_of_row_groups(source: SourceFile, number: int, piece_bytes: int) -> list[Piece]:
    try:
        sizes = row_group_sizes(source)
    except DamagedStreamError:
        sizes = []  # reading it says what is wrong
    groups, group_bytes = [0], 0
    for group, size in enumerate(sizes):
        if group_bytes >= piece_bytes:
            groups.append(group)
            group_bytes = 0
        group_bytes += size
    stops: list[int | None] = [*groups[1:], None]
    return [
        Piece(number, start, stop, sum(sizes[start:stop]) or source.size_bytes)
        for start, stop in zip(groups, stops, strict=True)
    ]


def piece_blocks(
    source: SourceFile,
    piece: Piece,
    start: Position,
    *,
    form: RecordFormat,
    block_bytes: int = BLOCK_BYTES,
    line_bytes: int = LINE_BYTES,
) -> Iterator[Block]:
    """Cut one piece into blocks, from `start` on, whose line and offset count from the piece's first record.

    Args:
        block_bytes: About as many bytes of lines are in one block.
        line_bytes: A longer line counts as damage, so that memory stays bounded.

    Raises:
        DamagedStreamError: After the last whole record before the damage.
        InputError: The file is of no known type.
    """
    kind = detect_kind(source)
    if kind == "parquet":
        keys = (form.text_key, form.subset_key)
        return parquet_blocks(source, start, keys, start=piece.start, stop=piece.stop)
    return line_blocks(
        source, kind, start, start=piece.start, stop=piece.stop, block_bytes=block_bytes, line_bytes=line_bytes
    )


def file_blocks(
    source: SourceFile,
    start: Position,
    *,
    form: RecordFormat,
    block_bytes: int = BLOCK_BYTES,
    line_bytes: int = LINE_BYTES,
) -> Iterator[Block]:
    """Cut a whole file into blocks; see `piece_blocks`."""
    return piece_blocks(source, Piece(0), start, form=form, block_bytes=block_bytes, line_bytes=line_bytes)


def read_records(
    files: Sequence[SourceFile], form: RecordFormat, *, on_reject: Callable[[Reject], None] | None = None
) -> Iterator[Record]:
    """Yield the non-empty records of files in order; for reading a corpus without tokenizing it.

    Args:
        on_reject: Told of each bad record, which is then passed over.

    Raises:
        RecordError: A record is bad, and there is no `on_reject`.
        DamagedStreamError: A file is damaged or ends early.
    """
    for number, file in enumerate(files):
        for block in file_blocks(file, Position(number), form=form):
            parsed = parse_block(block, form)
            for reject in parsed.rejects:
                if on_reject is None:
                    raise RecordError(reject.file, reject.line, reject.reason)
                on_reject(reject)
            yield from parsed.records()
