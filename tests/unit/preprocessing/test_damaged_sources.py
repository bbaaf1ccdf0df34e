"""A damaged source is an error or gives the records it held: never fewer, never others.

Every kind of file is cut at every byte, and every byte of every kind is changed. Plain JSON, WARC
and Arrow have no checksums, so that a changed letter in them is a changed text that nothing can
tell; for these, the number of records is held to.
"""

from pathlib import Path

import pytest
from packed_files import KINDS, TEXTS, parsed

from contracts.errors import InputError, ShardlineError
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.source_file import SourceFile
from preprocessing.reading.sources import expand_sources

HAS_CHECKSUMS = tuple(
    name for name in KINDS if name not in ("a.jsonl", "a.warc", "file.arrow", "stream.arrow", "open.tar")
)
# Where a stream of members or frames is cut between two of them, what stands before is whole.
MEMBERS = ("members.jsonl.gz", "frames.jsonl.zst", "streams.jsonl.xz", "streams.jsonl.bz2", "a.warc.wet.gz")


def outcome(folder: Path, name: str, data: bytes) -> list[str] | Exception:
    """Texts of a file, or the error, a reject counting as one."""
    path = folder / name
    path.write_bytes(data)
    texts = []
    try:
        for source in expand_sources([str(path)]):
            for block in parsed(source):
                if block.rejects:
                    return InputError(f"{block.file}, line {block.rejects[0].line}: {block.rejects[0].reason}")
                texts += block.texts
    except ShardlineError as error:
        return error
    return texts


@pytest.mark.parametrize("name", KINDS)
def test_a_file_cut_at_any_byte_is_an_error(tmp_path: Path, name: str):
    data = KINDS[name]()
    for cut in range(1, len(data)):
        found = outcome(tmp_path, name, data[:cut])
        if isinstance(found, Exception):
            assert name.split(".")[0] in str(found)
            continue
        if name == "a.jsonl":  # cut at the end of a line, or before the last newline
            assert found == TEXTS[: len(found)]
            assert data[cut - 1 : cut + 1] in (b"}\n",) or data[cut - 1 : cut] == b"\n"
        elif name in MEMBERS or name == "a.warc":
            assert found == TEXTS[: len(found)]
            is_boundary = any(data[cut:].startswith(magic) for magic in MAGICS)
            assert is_boundary, f"cut at {cut} of {len(data)} passes for a whole file"
        else:
            assert found == TEXTS, f"cut at {cut} of {len(data)} gives {len(found)} records"


MAGICS = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh", b"WARC/1.0")


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name in KINDS for change in (0x01, 0xFF) if (name, change) != ("open.tar", 0xFF)],
)
def test_a_file_with_any_byte_changed_is_an_error_or_gives_its_records(tmp_path: Path, name: str, change: int):
    data = KINDS[name]()
    for place in range(len(data)):
        found = outcome(tmp_path, name, data[:place] + bytes([data[place] ^ change]) + data[place + 1 :])
        if isinstance(found, Exception):
            continue
        if name in HAS_CHECKSUMS:
            assert found == TEXTS, f"byte {place} of {len(data)}: {found}"
        else:
            assert len(found) >= len(TEXTS) - 1, f"byte {place} of {len(data)}: {found}"


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("a.jsonl", "a.parquet")])
def test_damage_names_the_file_and_the_byte(tmp_path: Path, name: str):
    data = KINDS[name]()
    path = tmp_path / name
    path.write_bytes(data[: len(data) - 3 if name != "open.tar" else len(data) - 600])
    with pytest.raises(DamagedStreamError, match=r"byte \d+") as caught:
        for source in expand_sources([str(path)]):
            parsed(source)
    assert name in str(caught.value)


def test_a_file_that_shrinks_while_it_is_read_is_truncated(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n')
    source = SourceFile("a.jsonl", path, 0, 28)
    with pytest.raises(DamagedStreamError, match="ends at byte 14 of 28"):
        parsed(source)
