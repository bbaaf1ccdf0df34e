"""Pieces: however a file is cut, each of its records belongs to exactly one piece, in order."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocessing.reading.blocks import LineBlock, Position, RowBlock
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.pieces import Piece, cut_file, piece_blocks
from preprocessing.reading.records import RecordFormat
from preprocessing.reading.source_file import SourceFile

FORM = RecordFormat()
# Many newlines, of both systems, blank lines, lines longer than a piece, and a byte order mark.
LINES = st.lists(st.sampled_from([b"", b"\r", b"a", b"bc", b"\xef\xbb\xbfd", b"e" * 9, b"f" * 40]), max_size=12)


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    return b"\n".join(draw(LINES)) + draw(st.sampled_from([b"", b"\n", b"\n\n", b"g"]))


def data_of(source: SourceFile, piece: Piece, start: Position | None = None, block_bytes: int = 5) -> bytes:
    blocks = list(piece_blocks(source, piece, start or Position(), form=FORM, block_bytes=block_bytes))
    position = start or Position()
    for block in blocks:
        assert isinstance(block, LineBlock)
        assert block.start == position
        position = block.end
    return b"".join(block.data for block in blocks if isinstance(block, LineBlock))


def check_pieces(source: SourceFile, pieces: list[Piece], whole: bytes) -> None:
    assert pieces[0].start == 0
    assert pieces[-1].stop is None
    assert [piece.stop for piece in pieces[:-1]] == [piece.start for piece in pieces[1:]]
    found = [data_of(source, piece) for piece in pieces]
    assert b"".join(found) == whole
    ends = [data.endswith(b"\n") for data in found if data]
    assert all(ends[:-1])
    for piece, data in zip(pieces, found, strict=True):
        for line, offset in line_starts(data):
            assert data_of(source, piece, Position(0, line, offset)) == data[offset:]


def line_starts(data: bytes) -> list[tuple[int, int]]:
    """Line and offset of each line, and of the end."""
    starts, offset = [(1, 0)], 0
    for line in data.splitlines(keepends=True) if b"\r" not in data else [part + b"\n" for part in data.split(b"\n")]:
        offset = min(offset + len(line), len(data))
        starts.append((len(starts) + 1, offset))
    return starts


@given(contents(), st.lists(st.integers(1, 150), max_size=5))
@settings(max_examples=300)
def test_each_line_of_a_plain_file_is_in_one_piece_wherever_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, cuts: list[int]
):
    path = tmp_path_factory.getbasetemp() / "plain.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + whole)
    starts = sorted({0, *(cut for cut in cuts if cut < len(whole) + 3)})
    stops = [*starts[1:], None]
    pieces = [Piece(0, start, stop) for start, stop in zip(starts, stops, strict=True)]
    check_pieces(SourceFile("f", path), pieces, b"\xef\xbb\xbf" + whole)


def test_every_single_boundary_of_a_plain_file(tmp_path: Path):
    whole = b'{"a": 1}\r\n\n{"text": "bc"}\n' + b"x" * 30 + b"\nend"
    path = tmp_path / "f.jsonl"
    path.write_bytes(whole)
    for cut in range(1, len(whole)):
        check_pieces(SourceFile("f", path), [Piece(0, 0, cut), Piece(0, cut)], whole)


@given(st.lists(contents(), min_size=1, max_size=5), st.integers(1, 60), st.booleans())
@settings(max_examples=200)
def test_each_line_of_a_zstd_file_is_in_one_piece_wherever_its_frames_end(
    tmp_path_factory: pytest.TempPathFactory, frames: list[bytes], piece_bytes: int, has_checksum: bool
):
    path = tmp_path_factory.getbasetemp() / "frames.jsonl.zst"
    packer = zstandard.ZstdCompressor(write_checksum=has_checksum)
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    path.write_bytes(skippable + skippable.join(packer.compress(frame) for frame in frames))
    source = SourceFile("f", path)

    pieces = cut_file(source, 0, piece_bytes=piece_bytes, form=FORM)

    check_pieces(source, pieces, b"".join(frames))


def test_a_zstd_file_is_cut_at_frames_and_one_frame_is_one_piece(tmp_path: Path):
    packed = zstandard.ZstdCompressor().compress(b'{"text": "abc"}\n' * 100)
    path = tmp_path / "f.zst"
    path.write_bytes(packed * 10)
    pieces = cut_file(SourceFile("f", path), 3, piece_bytes=2 * len(packed), form=FORM)
    assert [piece.start for piece in pieces] == [n * len(packed) for n in (0, 2, 4, 6, 8)]
    assert {piece.file for piece in pieces} == {3}
    assert sum(piece.size_bytes for piece in pieces) == 10 * len(packed)

    path.write_bytes(zstandard.ZstdCompressor().compress(bytes(range(256)) * 40_000))
    assert len(cut_file(SourceFile("f", path), 0, piece_bytes=10, form=FORM)) == 1


@pytest.mark.parametrize("tail", [b"junk", zstandard.compress(b"cut short" * 9)[:-3], b"\x28\xb5"])
def test_a_zstd_file_with_an_odd_end_is_one_piece_and_its_damage_is_found(tmp_path: Path, tail: bytes):
    path = tmp_path / "f.zst"
    path.write_bytes(zstandard.compress(b'{"text": "abc"}\n') * 10 + tail)
    source = SourceFile("f", path)

    (piece,) = cut_file(source, 0, piece_bytes=10, form=FORM)

    with pytest.raises(DamagedStreamError):
        data_of(source, piece)


def test_damage_in_one_frame_is_found_in_its_piece_alone(tmp_path: Path):
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(b'{"text": "abc"}\n')
    broken = packed[:-1] + bytes([packed[-1] ^ 1])
    path = tmp_path / "f.zst"
    path.write_bytes(packed + broken + packed * 2)
    source = SourceFile("f", path)
    pieces = cut_file(source, 0, piece_bytes=1, form=FORM)
    assert len(pieces) == 4

    for piece, is_damaged in zip(pieces, (True, True, False, False), strict=True):
        if is_damaged:  # the first reads on into the second, where the last of its lines may end
            with pytest.raises(DamagedStreamError, match="before byte"):
                data_of(source, piece)
        else:
            data_of(source, piece)


@pytest.mark.parametrize("piece_bytes", [1, 300, 10**9])
def test_each_row_of_a_parquet_file_is_in_one_piece(tmp_path: Path, piece_bytes: int):
    path = tmp_path / "f.parquet"
    texts = [f"text {n}" for n in range(50)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=7)
    source = SourceFile("f", path)

    pieces = cut_file(source, 0, piece_bytes=piece_bytes, form=FORM)

    assert len(pieces) == {1: 8, 300: 4, 10**9: 1}[piece_bytes]
    found = []
    for piece in pieces:
        blocks = list(piece_blocks(source, piece, Position(), form=FORM))
        assert blocks[0].start == Position()
        rows = [row for block in blocks if isinstance(block, RowBlock) for row in block.rows]
        found += rows
        (rest,) = piece_blocks(source, piece, Position(0, len(rows)), form=FORM)
        assert isinstance(rest, RowBlock)
        assert (rest.start.line, rest.rows) == (len(rows), (rows[-1],))
    assert found == [{"text": text} for text in texts]


def test_a_file_that_became_shorter_than_its_pieces_is_truncated(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 10)
    source = SourceFile("f.jsonl", path)
    pieces = cut_file(source, 0, piece_bytes=50, form=FORM)
    path.write_bytes(b'{"text": "a"}\n' * 4)
    for piece in pieces[1:]:
        with pytest.raises(DamagedStreamError, match=r"f.jsonl: ends at byte 56, before byte \d+: the file became"):
            data_of(source, piece)


def test_the_cut_is_the_same_for_the_same_file_and_covers_it(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(json.dumps({"text": "x" * 90}).encode() + b"\n")
    path.write_bytes(path.read_bytes() * 100)
    size = path.stat().st_size
    pieces = cut_file(SourceFile("f", path), 0, piece_bytes=1000, form=FORM)
    assert [piece.start for piece in pieces] == list(range(0, size - 500, 1000))
    assert sum(piece.size_bytes for piece in pieces) == size
