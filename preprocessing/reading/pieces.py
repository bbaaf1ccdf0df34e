"""Pieces of files: stretches that can be read by themselves, and the blocks of each.

Plain files of lines are cut by bytes, zstd files of several frames by frames, Parquet files by
row groups, Arrow files by record batches, hub datasets by their shards. Whatever else there is,
and whatever looks odd, is one piece and read as a stream, so that damage is found where it is and
hides nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from contracts.errors import RecordError
from preprocessing.reading.arrow import arrow_file_blocks, arrow_stream_blocks, num_batches
from preprocessing.reading.blocks import BLOCK_BYTES, LINE_BYTES, Block, Position, from_line
from preprocessing.reading.compression import Chunks, decompressed_chunks
from preprocessing.reading.damage import DamagedStreamError, ForeignFileError
from preprocessing.reading.hub import hub_blocks, num_hub_shards
from preprocessing.reading.kinds import SEEKABLE, Content, FileKind, content_of, detect_kind
from preprocessing.reading.lines import line_blocks, piece_chunks
from preprocessing.reading.parquet import parquet_blocks, row_group_sizes
from preprocessing.reading.plain_text import document_blocks, paragraph_blocks
from preprocessing.reading.records import Record, RecordFormat, Reject, parse_block
from preprocessing.reading.source_file import SourceFile
from preprocessing.reading.tar_stream import tar_blocks
from preprocessing.reading.warc import warc_blocks
from preprocessing.reading.zstd_frames import UnusualFrameError, frame_starts


@dataclass(frozen=True)
class Piece:
    """A stretch of one source file that can be read without reading what stands before it.

    Args:
        file: Number of the file in the list of source files.
        start, stop: Where it begins and ends (exclusive; None: with the file): bytes of a plain
            file of lines, bytes at which zstd frames begin, numbers of Parquet row groups, of
            Arrow record batches or of a hub dataset's shards.
        size_bytes: On disk, for balance and progress.
    """

    file: int
    start: int = 0
    stop: int | None = None
    size_bytes: int = 0


def cut_file(source: SourceFile, number: int, *, piece_bytes: int, form: RecordFormat) -> list[Piece]:
    """Cut a file into pieces of about `piece_bytes` on disk; a function of the file alone.

    Args:
        number: Of the file in the list of source files.

    Raises:
        ConfigError: The file cannot be opened.
        ForeignFileError: The file is of no known type.
    """
    kind = detect_kind(source, form)
    size_bytes = source.size_bytes
    whole = [Piece(number, size_bytes=size_bytes)]
    if size_bytes <= piece_bytes:
        return whole
    if kind.content == "hub":
        return _grouped(number, [size_bytes // num_hub_shards(source)] * num_hub_shards(source), piece_bytes)
    try:
        if kind.content == "parquet":
            return _grouped(number, row_group_sizes(source), piece_bytes) or whole
        if kind.content == "arrow_file":
            batches = num_batches(source)
            return _grouped(number, [size_bytes // batches] * batches, piece_bytes) if batches else whole
    except DamagedStreamError:
        return whole  # reading it says what is wrong
    if not _is_of_lines(kind, form):
        return whole
    if kind.packing == "plain":
        starts = list(range(0, size_bytes, piece_bytes))
        if size_bytes - starts[-1] < piece_bytes // 2:
            starts.pop()
        return _pieces_between(number, starts, size_bytes)
    if kind.packing == "zstd" and not source.is_remote:  # the walk would ask for each header by itself
        return _pieces_of_frames(source, number, piece_bytes)
    return whole


def _pieces_between(number: int, starts: Sequence[int], size_bytes: int) -> list[Piece]:
    stops: list[int | None] = [*starts[1:], None]
    return [
        Piece(number, start, stop, (size_bytes if stop is None else stop) - start)
        for start, stop in zip(starts, stops, strict=True)
    ]


def _pieces_of_frames(source: SourceFile, number: int, piece_bytes: int) -> list[Piece]:
    try:
        with source.open() as file:
            frames = frame_starts(file, source.size_bytes)
    except (UnusualFrameError, DamagedStreamError):
        frames = [0]
    starts = [0]
    for start in frames:
        if start - starts[-1] >= piece_bytes:
            starts.append(start)
    return _pieces_between(number, starts, source.size_bytes)


def _grouped(number: int, sizes: Sequence[int], piece_bytes: int) -> list[Piece]:
    """Put row groups, batches or shards of these sizes together to pieces."""
    starts, group_bytes = [0], 0
    for unit, size in enumerate(sizes):
        if group_bytes >= piece_bytes:
            starts.append(unit)
            group_bytes = 0
        group_bytes += size
    stops: list[int | None] = [*starts[1:], None]
    return [
        Piece(number, start, stop, sum(sizes[start:stop])) for start, stop in zip(starts, stops, strict=True) if sizes
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
        ForeignFileError: The file is of no known type.
    """
    kind = detect_kind(source, form)
    keys = (form.text_key, form.subset_key)
    if kind.content == "parquet":
        return parquet_blocks(source, start, keys, start=piece.start, stop=piece.stop)
    if kind.content == "arrow_file":
        return arrow_file_blocks(source, start, keys, start=piece.start, stop=piece.stop)
    if kind.content == "arrow_stream":
        return arrow_stream_blocks(source, start, keys)
    if kind.content == "hub":
        return hub_blocks(source, start, keys, start=piece.start, stop=piece.stop)
    cut = _Cutter(source, form, block_bytes, line_bytes)
    if _is_of_lines(kind, form):
        expected = piece.start + piece.size_bytes
        if piece.size_bytes and source.size_bytes < expected:
            reason = f"ends at byte {source.size_bytes}, before byte {expected}: the file became shorter"
            raise DamagedStreamError(source.name, reason, True)
        chunks = piece_chunks(
            source, kind.packing, piece.start, piece.stop, start.offset, checked_only=form.checked_only
        )
        return cut(kind.content, chunks, start)
    chunks = decompressed_chunks(source, kind.packing, checked_only=form.checked_only)
    first = Position(start.piece)
    if kind.content != "tar":
        return from_line(cut(kind.content, chunks, first), start.line)
    is_text_wanted = form.content == "text"
    return from_line(tar_blocks(source, chunks, first, cut.member, is_text_wanted=is_text_wanted), start.line)


@dataclass(frozen=True)
class _Cutter:
    """Cuts decompressed chunks into blocks by what stands in them."""

    source: SourceFile
    form: RecordFormat
    block_bytes: int
    line_bytes: int

    def __call__(self, content: Content, chunks: Chunks, position: Position) -> Iterator[Block]:
        size, longest = self.block_bytes, self.line_bytes
        if content == "warc":
            return warc_blocks(self.source, chunks, position, block_bytes=size, line_bytes=longest)
        if content == "json_lines" or self.form.text_unit == "line":
            is_text = content == "text"
            return line_blocks(self.source, chunks, position, is_text=is_text, block_bytes=size, line_bytes=longest)
        if self.form.text_unit == "paragraph":
            return paragraph_blocks(self.source, chunks, position, block_bytes=size, line_bytes=longest)
        return document_blocks(self.source, chunks, position, line_bytes=self.line_bytes)

    def member(self, head: bytes, name: str, chunks: Chunks, position: Position) -> Iterator[Block]:
        """Cut a member of an archive."""
        where = f"{self.source.place}, member {name}"
        content = content_of(head, name, self.form, where=where)
        if content == "tar" or content in SEEKABLE:
            kind = content.partition("_")[0].title()
            raise ForeignFileError(f"{where}: {kind} inside tar is not read as a stream. Unpack the archive.")
        return self(content, chunks, position)


def _is_of_lines(kind: FileKind, form: RecordFormat) -> bool:
    return kind.content == "json_lines" or (kind.content == "text" and form.text_unit == "line")


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
