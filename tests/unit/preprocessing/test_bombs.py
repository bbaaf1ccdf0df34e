"""Small files that blow up: memory stays bounded, and the line is named."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from preprocessing.reading.blocks import Position, RowBlock
from preprocessing.reading.compression import CHUNK_BYTES, decompressed_chunks
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.pieces import file_blocks
from preprocessing.reading.records import RecordFormat
from preprocessing.reading.source_file import SourceFile


def _write(path: Path, data: bytes) -> SourceFile:
    path.write_bytes(zstandard.compress(data))
    return SourceFile(path.name, path)


def test_a_small_zstd_file_of_many_megabytes_comes_in_small_chunks(tmp_path: Path):
    source = _write(tmp_path / "a.jsonl.zst", b" " * 2**25)

    sizes = [len(chunk) for chunk, _ in decompressed_chunks(source, "zstd")]

    assert source.path.stat().st_size < 5000
    assert sum(sizes) == 2**25
    assert max(sizes) <= CHUNK_BYTES


def test_a_line_without_end_is_damage_after_the_whole_lines_before_it(tmp_path: Path):
    source = _write(tmp_path / "a.jsonl.zst", b'{"text":"a"}\n{"text":"b"}\n' + b" " * 2**25)
    blocks = file_blocks(source, Position(), form=RecordFormat(), line_bytes=2**22)

    assert next(blocks).data == b'{"text":"a"}\n{"text":"b"}\n'
    with pytest.raises(DamagedStreamError, match=r"a.jsonl.zst: line 3 is longer than 4194304 bytes"):
        next(blocks)


def test_a_row_too_long_for_a_record_is_rejected_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("preprocessing.reading.parquet.LINE_BYTES", 1000)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", " " * 5000, "b"]}), path, compression="zstd")

    (block,) = file_blocks(SourceFile(path.name, path), Position(), form=RecordFormat())

    assert isinstance(block, RowBlock)
    assert block.rows == ({"text": "a"}, "the row is longer than 1000 bytes, which no record is", {"text": "b"})
