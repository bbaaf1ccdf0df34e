"""Records and blocks: every line is accounted for, whatever its bytes."""

import gzip
import json
from pathlib import Path

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InputError
from preprocessing.reading.blocks import LineBlock, Position
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.kinds import detect_kind
from preprocessing.reading.pieces import file_blocks
from preprocessing.reading.records import RecordFormat, parse_block
from preprocessing.reading.source_file import SourceFile

FORM = RecordFormat()


def blocks_of(path: Path, start: Position | None = None, size: int = 64) -> list[LineBlock]:
    found = file_blocks(SourceFile(path.name, path), start or Position(), form=FORM, block_bytes=size)
    return [block for block in found if isinstance(block, LineBlock)]


def parse(data: bytes, form: RecordFormat = FORM):
    return parse_block(LineBlock(SourceFile("f", Path("f")), Position(), data, 0), form)


@given(st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")), max_size=12))
def test_every_line_is_a_record_or_empty_or_rejected(lines: list[bytes]):
    data = b"".join(line + b"\n" for line in lines)
    parsed = parse(data)

    rejected = {reject.line: reject.offset for reject in parsed.rejects}
    empty = dict(zip(parsed.empty_lines, parsed.empty_offsets, strict=True))
    good = {record.line: record.offset for record in parsed.records()}
    assert len(good) + len(empty) + len(rejected) == len(lines)
    offsets = good | empty | rejected
    assert sorted(offsets) == list(range(1, len(lines) + 1))
    starts = [sum(len(line) + 1 for line in lines[:n]) for n in range(len(lines))]
    assert [offsets[n + 1] for n in range(len(lines))] == starts


@given(st.text(), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5))
def test_any_text_comes_back_as_it_was(text: str, subset: str):
    encodable = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    line = json.dumps({"text": encodable, "meta": {"pile_set_name": subset}})
    parsed = parse(line.encode("utf-8", "surrogatepass") + b"\n")

    (found,) = parsed.with_empty().records()
    assert (found.text, found.subset) == (encodable, subset)


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "a", "text": "b"}',
        b'{"text": "b", "x": NaN}',
        b'{"text": "b", "x": "\\ud800"}',
        b'{"text": "b", "n": 1e999}',
    ],
)
def test_what_orjson_refuses_is_read_as_json_reads_it(line: bytes):
    (record,) = parse(line + b"\n").records()
    assert record.text == json.loads(line)["text"] == "b"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'["a"]', "the record is a list, not an object with the key 'text'"),
        (b"3", "the record is the number 3"),
        (b'{"text": 3.5}', "'text' is the number 3.5, not text"),
        (b'{"text": null}', "'text' is null, not text"),
        (b'{"text": true}', "'text' is true, not text"),
        (b'{"text": {"a": 1}}', "'text' is an object, not text"),
        (b'{"id": 1, "content": "x"}', "no key 'text'; keys present: content, id"),
        (b"{}", "no key 'text'; keys present: none"),
        (b'{"text": "a"', "invalid or incomplete JSON"),
        (b'{"text": "a"} x', "invalid or incomplete JSON"),
        (b"[", "JSON over several lines: write each record on one line"),
        (b"Once upon a time", 'each line must be one JSON object such as {"text": "..."}'),
        (b"\0\0\0", "3 NUL bytes instead of a record"),
        (b"[" * 100_000, "JSON is nested too deeply"),
    ],
)
def test_a_bad_record_says_why(line: bytes, reason: str):
    (reject,) = parse(line + b"\n").rejects
    assert reason in reject.reason


def test_line_ends_of_windows_and_blank_lines_are_no_error():
    parsed = parse(b'{"text": "a"}\r\n\r\n   \n{"text": "b"}')
    assert parsed.texts == ["a", "b"]
    assert parsed.empty_lines == [2, 3]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_blocks_cover_a_file_and_any_of_them_is_a_place_to_begin(tmp_path: Path, suffix: str, size: int):
    data = (
        b"".join(orjson.dumps({"text": f"line {n} " + "é" * (n % 7)}) + b"\n" for n in range(40)) + b'{"text": "end"}'
    )
    pack = {"": lambda x: x, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    path = tmp_path / f"f.jsonl{suffix}"
    path.write_bytes(pack(data))

    blocks = blocks_of(path, size=size)
    assert b"".join(block.data for block in blocks) == data
    for block in blocks:
        rest = blocks_of(path, start=block.start, size=size)
        assert b"".join(item.data for item in rest) == data[block.start.offset :]
        assert rest[0].start == block.start
    assert blocks[-1].end.line == 42


def test_a_line_longer_than_a_block_stays_whole(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 300_000 + b'"}\n{"text": "b"}\n')
    lines = [line for block in blocks_of(path) for line in block.data.splitlines()]
    assert [len(line) for line in lines] == [300_012, 13]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
@given(share=st.floats(0.05, 0.98))
def test_a_truncated_stream_is_never_taken_for_a_whole_one(
    tmp_path_factory: pytest.TempPathFactory, pack, share: float
):
    data = b"".join(orjson.dumps({"text": f"{n} {hash(n * 7919)}"}) + b"\n" for n in range(400))
    packed = pack(data)
    path = tmp_path_factory.mktemp("cut") / "f"
    path.write_bytes(packed[: max(5, int(len(packed) * share))])

    taken = b""
    with pytest.raises(DamagedStreamError) as caught:
        for block in file_blocks(SourceFile("f", path), Position(), form=FORM):
            assert isinstance(block, LineBlock)
            taken += block.data
    assert caught.value.is_truncated
    assert data.startswith(taken)
    assert taken == b"" or taken.endswith(b"\n")


def test_junk_after_a_stream_is_damage_not_truncation(tmp_path: Path):
    path = tmp_path / "f.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(b'{"text": "a"}\n') + b"junk")
    with pytest.raises(DamagedStreamError, match="bytes that are not zstd") as caught:
        list(file_blocks(SourceFile("f.zst", path), Position(), form=FORM))
    assert not caught.value.is_truncated


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"PK\x03\x04", "zip"),
        (b"\x04\x22\x4d\x18", "lz4"),
        (b"FEA1", "Feather version 1"),
        (b"\xff\xfe{\0", "UTF-16"),
    ],
)
def test_types_that_are_not_read_are_named(tmp_path: Path, head: bytes, name: str):
    (tmp_path / "f").write_bytes(head + b"rest")
    with pytest.raises(InputError, match=f"say {name}, which is not read"):
        detect_kind(SourceFile("f", tmp_path / "f"), FORM)


@pytest.mark.parametrize("suffix", ["zst", "gz", "xz", "bz2", "parquet", "arrow", "tar", "tgz"])
def test_an_empty_file_with_the_name_of_another_kind_is_an_error(tmp_path: Path, suffix: str):
    (tmp_path / f"f.{suffix}").write_bytes(b"")
    with pytest.raises(InputError, match=rf"holds no byte, so it is no {suffix} file"):
        detect_kind(SourceFile(f"f.{suffix}", tmp_path / f"f.{suffix}"), FORM)
