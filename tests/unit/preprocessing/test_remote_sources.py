"""Files by address are to the rest what files by path are; their servers say what tells them apart."""

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest
from packed_files import FORM, KINDS, TEXTS, json_lines, parsed, table, texts_of

from contracts.errors import ConfigError
from preprocessing.reading.blocks import Position
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.pieces import cut_file, piece_blocks
from preprocessing.reading.records import parse_block
from preprocessing.reading.remote import is_url
from preprocessing.reading.source_file import SourceFile
from preprocessing.reading.sources import SourceSettings, expand_sources, raw_source_files, raw_source_identities


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def test_a_file_address_is_a_path(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(json_lines())
    (source,) = expand_sources([f"file://{tmp_path}/a.jsonl"])
    assert source == SourceFile("a.jsonl", tmp_path / "a.jsonl")
    assert [file.name for file in expand_sources([f"file://{tmp_path}"])] == ["a.jsonl"]


@pytest.mark.parametrize("name", [name for name in KINDS if name != "open.tar"])
def test_every_kind_is_read_by_its_address(memory: fsspec.AbstractFileSystem, name: str):
    memory.pipe_file(f"/data/{name}", KINDS[name]())
    (source,) = expand_sources([f"memory://data/{name}"])
    assert (source.name, source.size_bytes) == (name, len(KINDS[name]()))
    assert texts_of(source) == TEXTS


def test_an_open_archive_is_read_by_its_address_as_a_stream(memory: fsspec.AbstractFileSystem):
    memory.pipe_file("/data/open.tar", KINDS["open.tar"]())
    (source,) = expand_sources(["memory://data/open.tar"])
    assert texts_of(source) == TEXTS


def test_folders_and_globs_of_addresses_are_listed_by_name(memory: fsspec.AbstractFileSystem):
    for name in ("b/2.jsonl", "a/1.jsonl", "a/.hidden.jsonl", "a/notes.md", "3.jsonl"):
        memory.pipe_file(f"/data/{name}", json_lines())
    assert [file.name for file in expand_sources(["memory://data"])] == ["3.jsonl", "a/1.jsonl", "b/2.jsonl"]
    assert [file.name for file in expand_sources(["memory://data/*/*.jsonl"])][-2:] == ["a/1.jsonl", "b/2.jsonl"]
    with pytest.raises(ConfigError, match=r"memory://data/none.jsonl: there is no such file"):
        expand_sources(["memory://data/none.jsonl"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "file.arrow"])
def test_pieces_of_a_file_elsewhere_hold_each_record_once(memory: fsspec.AbstractFileSystem, name: str):
    memory.pipe_file(f"/data/{name}", KINDS[name]())
    (source,) = expand_sources([f"memory://data/{name}"])
    pieces = cut_file(source, 0, piece_bytes=source.size_bytes // 6, form=FORM)
    assert len(pieces) > 1
    blocks = [block for piece in pieces for block in piece_blocks(source, piece, Position(), form=FORM)]
    assert [text for block in blocks for text in parse_block(block, FORM).texts] == TEXTS


def test_what_tells_a_file_elsewhere_from_another_changes_with_it(memory: fsspec.AbstractFileSystem, tmp_path: Path):
    (tmp_path / "b.jsonl").write_bytes(b"")
    memory.pipe_file("/data/a.jsonl", b"one\n")
    sources = ["memory://data/a.jsonl", str(tmp_path / "b.jsonl")]
    before = raw_source_identities(sources, SourceSettings())
    assert list(before) == ["source000000/a.jsonl"]
    assert raw_source_files(sources, SourceSettings()) == {"source000001/b.jsonl": tmp_path / "b.jsonl"}
    memory.pipe_file("/data/a.jsonl", b"two\n")
    assert raw_source_identities(sources, SourceSettings()) != before


def test_a_file_that_became_shorter_than_its_server_said_is_truncated(memory: fsspec.AbstractFileSystem):
    memory.pipe_file("/data/a.jsonl", json_lines())
    (source,) = expand_sources(["memory://data/a.jsonl"])
    memory.pipe_file("/data/a.jsonl", json_lines()[:60])
    with pytest.raises(DamagedStreamError, match=r"a.jsonl: ends at byte 60 of \d+: the file is truncated"):
        parsed(source)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    handler = partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "frames.jsonl.zst", "a.parquet"])
def test_a_web_server_without_ranges_is_read_too(web: str, tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(KINDS[name]())
    (source,) = expand_sources([f"{web}/{name}"])
    assert texts_of(source) == TEXTS
    (identity,) = raw_source_identities([f"{web}/{name}"], SourceSettings()).values()
    assert identity.endswith(f"GMT;size:{source.size_bytes}")
    with pytest.raises(ConfigError, match=r"none\.jsonl: there is no such file"):
        expand_sources([f"{web}/none.jsonl"])


def test_an_address_of_nobody_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"nothing://a/b: no file system for nothing:// is known"):
        expand_sources(["nothing://a/b"])
    assert not is_url("a/b://c")
    assert not is_url("/data/a.jsonl")


def test_memory_is_known_to_be_of_this_process_alone(memory: fsspec.AbstractFileSystem):
    memory.pipe_file("/data/a.jsonl", b"")
    (source,) = expand_sources(["memory://data/a.jsonl"])
    assert source.is_in_this_process_only
    assert not SourceFile("a", "s3://b/a").is_in_this_process_only


def test_parquet_is_read_in_parts_by_address(memory: fsspec.AbstractFileSystem):
    with memory.open("/data/a.parquet", "wb") as target:
        pq.write_table(table(), target)
    assert texts_of(expand_sources(["memory://data/a.parquet"])[0]) == TEXTS
