"""Small source files of every kind, all with the same texts."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from preprocessing.reading.blocks import Position
from preprocessing.reading.pieces import file_blocks
from preprocessing.reading.records import ParsedBlock, RecordFormat, parse_block
from preprocessing.reading.source_file import SourceFile

TEXTS = ["first", "ünicode 数 \U0001f642", "two\nlines", "x" * 70, "last"]
FORM = RecordFormat()


def json_lines(texts: list[str] = TEXTS) -> bytes:
    rows = ({"text": text, "meta": {"pile_set_name": f"s{n % 2}"}} for n, text in enumerate(texts))
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def tar(members: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    # One block after the end instead of 20, so that a test need not try each of their bytes.
    whole = target.getvalue().rstrip(b"\0")
    return whole + bytes(-len(whole) % 512 + 1024)


def warc(texts: list[str] = TEXTS, kind: str = "conversion") -> bytes:
    records = [b"WARC/1.0\r\nWARC-Type: warcinfo\r\nContent-Length: 4\r\n\r\ninfo\r\n\r\n"]
    for text in texts:
        data = text.encode()
        header = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://a/\r\nContent-Length: {len(data)}\r\n\r\n"
        records.append(header.encode() + data + b"\r\n\r\n")
    return b"".join(records)


def table(texts: list[str] = TEXTS) -> pa.Table:
    return pa.table({"text": texts, "meta": [{"pile_set_name": f"s{n % 2}"} for n in range(len(texts))]})


def parquet() -> bytes:
    target = io.BytesIO()
    pq.write_table(table(), target, row_group_size=2, write_page_checksum=True)
    return target.getvalue()


def arrow(*, is_stream: bool) -> bytes:
    target = io.BytesIO()
    make = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with make(target, table().schema) as writer:
        writer.write_table(table(), max_chunksize=2)
    return target.getvalue()


def halves(pack: Callable[[bytes], bytes]) -> bytes:
    """Two members or frames, with the boundary inside a record."""
    data = json_lines()
    return pack(data[:40]) + pack(data[40:])


def _members() -> dict[str, bytes]:
    return {"b/a.jsonl": json_lines(TEXTS[:2]), "note.md": b"no data", "c.jsonl.zst": zstd(json_lines(TEXTS[2:]))}


KINDS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": json_lines,
    "a.jsonl.gz": lambda: gzip.compress(json_lines(), mtime=0),
    "a.jsonl.zst": lambda: zstd(json_lines()),
    "a.jsonl.xz": lambda: lzma.compress(json_lines()),
    "a.jsonl.bz2": lambda: bz2.compress(json_lines()),
    "members.jsonl.gz": lambda: halves(lambda data: gzip.compress(data, mtime=0)),
    "frames.jsonl.zst": lambda: b"\x50\x2a\x4d\x18\x03\0\0\0abc" + halves(zstd),
    "streams.jsonl.xz": lambda: halves(lzma.compress),
    "streams.jsonl.bz2": lambda: halves(bz2.compress),
    "open.tar": lambda: tar(
        {"b/a.jsonl": json_lines(TEXTS[:2]), "note.md": b"no data", "c.jsonl.zst": zstd(json_lines(TEXTS[2:]))}
    ),
    "packed.tar.gz": lambda: gzip.compress(
        tar(_members()),
        mtime=0,
    ),
    "packed.tar.zst": lambda: zstd(tar({"a.jsonl.gz": gzip.compress(json_lines(), mtime=0)})),
    "a.parquet": parquet,
    "file.arrow": lambda: arrow(is_stream=False),
    "stream.arrow": lambda: arrow(is_stream=True),
    "a.warc": warc,
    "a.warc.wet.gz": lambda: b"".join(
        gzip.compress(b"WARC/" + record, mtime=0) for record in warc().split(b"WARC/")[1:]
    ),
}


def write_kind(folder: Path, name: str) -> SourceFile:
    path = folder / name
    path.write_bytes(KINDS[name]())
    return SourceFile(name, path)


def parsed(source: SourceFile, form: RecordFormat = FORM, start: Position | None = None) -> list[ParsedBlock]:
    return [parse_block(block, form) for block in file_blocks(source, start or Position(), form=form, block_bytes=50)]


def texts_of(source: SourceFile, form: RecordFormat = FORM) -> list[str]:
    return [text for block in parsed(source, form) for text in block.texts]
