"""Every kind of source gives the same records, from any place on, and says what is wrong with it."""

import bz2
import gzip
import io
import lzma
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from packed_files import FORM, KINDS, TEXTS, json_lines, parsed, tar, texts_of, warc, write_kind

from contracts.errors import ConfigError, InputError
from preprocessing.reading.blocks import Position, RowBlock
from preprocessing.reading.damage import DamagedStreamError, ForeignFileError
from preprocessing.reading.kinds import detect_kind
from preprocessing.reading.pieces import cut_file, file_blocks, piece_blocks
from preprocessing.reading.records import RecordFormat, parse_block
from preprocessing.reading.source_file import SourceFile
from preprocessing.reading.sources import SourceSettings, expand_sources


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_records(tmp_path: Path, name: str):
    source = write_kind(tmp_path, name)
    blocks = parsed(source)
    assert [text for block in blocks for text in block.texts] == TEXTS
    assert not any(block.rejects for block in blocks)
    if "warc" not in name:
        assert [subset for block in blocks for subset in block.subsets] == ["s0", "s1", "s0", "s1", "s0"]


@pytest.mark.parametrize("name", KINDS)
def test_a_file_without_a_known_name_is_told_by_its_bytes(tmp_path: Path, name: str):
    path = tmp_path / "data"
    path.write_bytes(KINDS[name]())
    assert texts_of(SourceFile("data", path)) == TEXTS


@pytest.mark.parametrize("name", KINDS)
def test_reading_goes_on_at_any_record(tmp_path: Path, name: str):
    source = write_kind(tmp_path, name)
    blocks = parsed(source)
    lines = [line for block in blocks for line in block.lines]
    offsets = [offset for block in blocks for offset in block.offsets]
    for number, (line, offset) in enumerate(zip(lines, offsets, strict=True)):
        rest = parsed(source, start=Position(0, line, offset))
        assert [text for block in rest for text in block.texts] == TEXTS[number:]
        assert [n for block in rest for n in block.lines] == lines[number:]
        assert [n for block in rest for n in block.offsets] == offsets[number:]
    end = [block.end for block in file_blocks(source, Position(), form=FORM)][-1]
    assert parsed(source, start=end) == []


@pytest.mark.parametrize("name", ["a.jsonl", "frames.jsonl.zst", "a.parquet", "file.arrow"])
def test_what_can_be_cut_is_cut(tmp_path: Path, name: str):
    source = write_kind(tmp_path, name)
    assert len(cut_file(source, 0, piece_bytes=source.size_bytes // 6, form=FORM)) > 1
    assert len(cut_file(source, 0, piece_bytes=source.size_bytes, form=FORM)) == 1


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["a.jsonl", "d" * 120 + "/" + "é" * 60 + ".jsonl"])
def test_members_of_an_archive_are_files_of_their_own(tmp_path: Path, form: int, name: str):
    if form == tarfile.USTAR_FORMAT and len(name) > 100:
        name = "d" * 120 + "/a.jsonl"
    (tmp_path / "t.tar").write_bytes(tar({name: json_lines(), "._a.jsonl": b"junk", "empty.jsonl": b""}, form))
    first, second = expand_sources([str(tmp_path / "t.tar")])
    assert (first.name, texts_of(first)) == (f"t.tar/{name}", TEXTS)
    assert (second.name, texts_of(second), second.size_bytes) == ("t.tar/empty.jsonl", [], 0)


@pytest.mark.parametrize("name", ["a.jsonl", "frames.jsonl.zst", "a.parquet", "file.arrow"])
def test_a_large_member_of_an_archive_is_cut_as_a_file_is(tmp_path: Path, name: str):
    (tmp_path / "t.tar").write_bytes(tar({"first.jsonl": json_lines(), name: KINDS[name]()}))
    _, member = expand_sources([str(tmp_path / "t.tar")])
    pieces = cut_file(member, 0, piece_bytes=member.size_bytes // 6, form=FORM)
    assert len(pieces) > 1
    blocks = [block for piece in pieces for block in piece_blocks(member, piece, Position(), form=FORM)]
    assert [text for block in blocks for text in parse_block(block, FORM).texts] == TEXTS


def test_a_compressed_archive_stays_one_file_whose_lines_are_counted_through(tmp_path: Path):
    source = write_kind(tmp_path, "packed.tar.gz")
    assert expand_sources([str(tmp_path)]) == [source]
    assert [line for block in parsed(source) for line in block.lines] == [1, 2, 3, 4, 5]


def test_a_line_without_its_newline_ends_with_its_member(tmp_path: Path):
    data = json_lines()
    (tmp_path / "t.tar.gz").write_bytes(gzip.compress(tar({"a.jsonl": data[:-1], "b.jsonl": data})))
    assert texts_of(SourceFile("t", tmp_path / "t.tar.gz")) == TEXTS * 2


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"a.md": b"text"}, "holds no data file"),
        ({"a.tar": tar({"a.jsonl": b""})}, "member a.tar: Tar inside tar is not read"),
        ({"a.parquet": b"PAR1"}, "member a.parquet: Parquet inside tar is not read"),
    ],
)
def test_a_compressed_archive_with_nothing_to_read_is_an_error(tmp_path: Path, members: dict[str, bytes], reason: str):
    (tmp_path / "t.tar.gz").write_bytes(gzip.compress(tar(members)))
    with pytest.raises(InputError, match=reason):
        texts_of(SourceFile("t.tar.gz", tmp_path / "t.tar.gz"))


def test_an_open_archive_with_nothing_to_read_is_an_error(tmp_path: Path):
    (tmp_path / "t.tar").write_bytes(tar({"a.md": b"text"}))
    with pytest.raises(ConfigError, match="none of its 1 members is a data file"):
        expand_sources([str(tmp_path / "t.tar")])


@pytest.mark.parametrize("blocks_left", [0, 1])
def test_an_archive_without_its_end_is_truncated(tmp_path: Path, blocks_left: int):
    whole = tar({"a.jsonl": json_lines()})
    (tmp_path / "t.tar").write_bytes(whole[: len(whole) - 1024 + 512 * blocks_left])
    (source,) = expand_sources([str(tmp_path / "t.tar")])
    with pytest.raises(DamagedStreamError, match="tar archive is truncated at byte") as caught:
        texts_of(source)
    assert caught.value.is_truncated


def test_zeros_between_streams_of_xz_are_padding_and_other_bytes_are_not(tmp_path: Path):
    path = tmp_path / "a.xz"
    path.write_bytes(lzma.compress(json_lines()) + bytes(8) + lzma.compress(json_lines()) + bytes(4))
    assert texts_of(SourceFile("a.xz", path)) == TEXTS * 2
    path.write_bytes(lzma.compress(json_lines()) + b"junk" * 4)
    with pytest.raises(DamagedStreamError, match="bytes that are not xz, before byte"):
        texts_of(SourceFile("a.xz", path))


@pytest.mark.parametrize("pack", [lzma.compress, bz2.compress, zstandard.compress, gzip.compress])
def test_a_small_file_of_many_megabytes_comes_in_small_chunks(tmp_path: Path, pack):
    path = tmp_path / "a"
    path.write_bytes(pack((b" " * 2**20 + b"\n") * 40))
    sizes = [len(block.data) for block in file_blocks(SourceFile("a", path), Position(), form=FORM)]
    assert sum(sizes) == 40 * (2**20 + 1)
    assert max(sizes) < 2**23


def test_parquet_inside_a_compression_is_refused_with_the_cure(tmp_path: Path):
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(KINDS["a.parquet"]()))
    with pytest.raises(InputError, match=r"Parquet file inside gzip, which cannot be read in parts\. Unpack it"):
        detect_kind(SourceFile("a", tmp_path / "a.parquet.gz"), FORM)


def test_binary_columns_of_parquet_and_arrow_are_text_in_utf8(tmp_path: Path):
    table = pa.table({"text": pa.array([b"a", "é".encode(), b"\xff"], type=pa.binary())})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as target, pa.ipc.new_file(target, table.schema) as writer:
        writer.write_table(table)
    (block,) = parsed(SourceFile("a", tmp_path / "a.arrow"))
    assert block.texts == ["a", "é"]
    assert [(reject.line, reject.reason) for reject in block.rejects] == [
        (3, "byte 0xff at position 0 of the text is not valid UTF-8")
    ]


def test_text_that_is_not_utf8_rejects_its_row_alone_in_arrow(tmp_path: Path):
    values = pa.array([b"a", b"\xff", b"b"], type=pa.binary()).view(pa.string())
    table = pa.table({"text": values})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as target, pa.ipc.new_stream(target, table.schema) as writer:
        writer.write_table(table)
    (block,) = parsed(SourceFile("a", tmp_path / "a.arrow"))
    assert block.texts == ["a", "b"]
    assert [reject.line for reject in block.rejects] == [2]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_column_that_stands_twice_is_refused(tmp_path: Path, name: str):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.OSFile(str(tmp_path / name), "wb") as target, pa.ipc.new_file(target, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(ForeignFileError, match="has several columns named 'text'"):
        parsed(SourceFile(name, tmp_path / name))


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_texts_of_every_type_are_read_and_none_is_no_text(tmp_path: Path, name: str, kind: pa.DataType):
    table = pa.table({"text": pa.array(["x", "é", None]).cast(kind)})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.OSFile(str(tmp_path / name), "wb") as target, pa.ipc.new_stream(target, table.schema) as writer:
            writer.write_table(table)
    (block,) = parsed(SourceFile(name, tmp_path / name))
    assert block.texts == ["x", "é"]
    assert [(reject.line, reject.reason) for reject in block.rejects] == [(3, "'text' is null, not text")]


def test_large_rows_come_in_small_blocks(tmp_path: Path):
    pq.write_table(pa.table({"text": ["x" * 300_000] * 40}), tmp_path / "a.parquet", use_dictionary=False)
    blocks = list(file_blocks(SourceFile("a", tmp_path / "a.parquet"), Position(), form=FORM))
    assert [len(block.rows) for block in blocks if isinstance(block, RowBlock)] == [6] * 6 + [4]


def test_a_pointer_of_git_lfs_is_not_the_file(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n")
    with pytest.raises(ForeignFileError, match="is a pointer of Git LFS, not the file"):
        parsed(SourceFile("a.txt", tmp_path / "a.txt"))


def test_a_compressed_member_of_no_byte_is_an_error(tmp_path: Path):
    (tmp_path / "t.tar.gz").write_bytes(gzip.compress(tar({"a.jsonl": json_lines(), "b.jsonl.zst": b""})))
    with pytest.raises(DamagedStreamError, match=r"its member b.jsonl.zst, at byte \d+ of the archive, holds no byte"):
        parsed(SourceFile("t", tmp_path / "t.tar.gz"))


UNITS = b"\xef\xbb\xbfone\r\ntwo\n\n  \nthree\n four\n\n\nfive"


@pytest.mark.parametrize(
    ("unit", "texts", "empty"),
    [
        ("line", ["one", "two", "three", " four", "five"], 4),
        ("paragraph", ["one\r\ntwo", "three\n four", "five"], 0),
        ("document", [UNITS.decode("utf-8-sig")], 0),
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_plain_text_is_cut_into_documents_by_its_unit(tmp_path: Path, unit, texts: list[str], empty: int, pack):
    (tmp_path / "a.txt").write_bytes(pack(UNITS))
    form = RecordFormat(text_unit=unit)
    blocks = parsed(SourceFile("a.txt", tmp_path / "a.txt"), form)
    assert [text for block in blocks for text in block.texts] == texts
    assert sum(len(block.empty_lines) for block in blocks) == empty
    for block in blocks:
        for line, offset, text in zip(block.lines, block.offsets, block.texts, strict=True):
            assert UNITS[offset:].removeprefix(b"\xef\xbb\xbf").startswith(text.encode())
            (again, *_) = parsed(SourceFile("a.txt", tmp_path / "a.txt"), form, Position(0, line, offset))
            assert (again.lines[0], again.texts[0]) == (line, text)


def test_text_is_told_by_name_or_by_setting_and_json_by_its_first_character(tmp_path: Path):
    for name, data in {"a.txt": b"words", "b.txt": b'{"text": "x"}\n', "c.dat": b"words"}.items():
        (tmp_path / name).write_bytes(data)
    kinds = {
        name: detect_kind(SourceFile(name, tmp_path / name), form).content
        for name, form in [("a.txt", FORM), ("b.txt", FORM), ("c.dat", RecordFormat(content="text"))]
    }
    assert kinds == {"a.txt": "text", "b.txt": "json_lines", "c.dat": "text"}
    assert detect_kind(SourceFile("c", tmp_path / "c.dat"), FORM).content == "json_lines"
    with pytest.raises(ConfigError, match=r"plain text by format: text"):
        expand_sources([str(tmp_path)])
    found = expand_sources([str(tmp_path)], SourceSettings(is_text_wanted=True))
    assert [file.name for file in found] == ["a.txt", "b.txt"]


def test_a_text_too_long_for_a_document_says_what_to_do(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"x" * 3000)
    source = SourceFile("a.txt", tmp_path / "a.txt")
    with pytest.raises(DamagedStreamError, match="set text_unit to line or paragraph"):
        list(file_blocks(source, Position(), form=FORM, line_bytes=1000))
    with pytest.raises(DamagedStreamError, match="is longer than 1000 bytes"):
        list(file_blocks(source, Position(), form=RecordFormat(text_unit="paragraph"), line_bytes=1000))


def test_invalid_bytes_in_text_are_rejected_or_replaced_and_counted(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"good\nb\xffd\n")
    source = SourceFile("a.txt", tmp_path / "a.txt")
    (block,) = parsed(source, RecordFormat(text_unit="line"))
    assert [(reject.line, reject.offset) for reject in block.rejects] == [(2, 5)]
    (block,) = parsed(source, RecordFormat(text_unit="line", replaces_invalid=True))
    assert (block.texts, block.events) == (["good", "b\ufffdd"], [(2, "replaced_characters", 1)])


def test_warc_records_of_other_types_are_filtered_by_type_and_headers_can_name_subsets(tmp_path: Path):
    (tmp_path / "a.warc").write_bytes(warc(TEXTS[:1]) + warc(TEXTS[1:2], kind="response"))
    form = RecordFormat(subset_key="WARC-Target-URI")
    blocks = parsed(SourceFile("a.warc", tmp_path / "a.warc"), form)
    assert [item for block in blocks for item in block.filtered] == [
        (1, "WARC record of type warcinfo"),
        (3, "WARC record of type warcinfo"),
        (4, "WARC record of type response"),
    ]
    assert [(block.texts, block.lines, block.subsets) for block in blocks if block.texts] == [
        (["first"], [2], ["http://a/"])
    ]


def test_warc_files_of_another_writer_are_read(tmp_path: Path):
    from warcio.warcwriter import WARCWriter

    target = io.BytesIO()
    writer = WARCWriter(target, gzip=True)
    writer.write_record(writer.create_warcinfo_record("a.warc.gz", {"software": "test"}))
    for text in TEXTS:
        payload = io.BytesIO(text.encode())
        writer.write_record(writer.create_warc_record("http://a/", "conversion", payload=payload))
    (tmp_path / "a.warc.gz").write_bytes(target.getvalue())
    assert texts_of(SourceFile("a", tmp_path / "a.warc.gz")) == TEXTS


def test_a_warc_record_too_long_is_rejected_alone(tmp_path: Path):
    (tmp_path / "a.warc").write_bytes(warc(["a", "b" * 5000, "c"]))
    source = SourceFile("a.warc", tmp_path / "a.warc")
    blocks = [parse_block(block, FORM) for block in file_blocks(source, Position(), form=FORM, line_bytes=1000)]
    assert [text for block in blocks for text in block.texts] == ["a", "c"]
    assert [reject.reason for block in blocks for reject in block.rejects] == [
        "the record is longer than 1000 bytes, which no document is"
    ]
