"""Sources that change while they are read, and data behind links: an error or the data, never a mixture."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from ingest_cases import CASES, ingest_files

from contracts.errors import ConfigError, InputError
from contracts.store import ArtifactStore
from preprocessing.config import IndexConfig, IngestConfig
from preprocessing.ingestion import ingest as module
from preprocessing.ingestion.ingest import INGEST
from preprocessing.samples.objectives import T5Config
from preprocessing.samples.t5_lengths import lengths_for_encoder, lengths_of_window


def write(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.mark.parametrize("change", ["appended", "same size"])
def test_a_source_that_changes_while_it_is_read_gives_no_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
):
    source = write(tmp_path / "a.jsonl", "one", "two")
    os.utime(source, (1_700_000_000, 1_700_000_000))
    whole = module.run_parts

    def then_changed(*arguments: object, **more: object) -> object:
        write(source, "one", "two", "three") if change == "appended" else write(source, "one", "tow")
        return whole(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "run_parts", then_changed)
    config = IngestConfig(sources=(str(source),), tokenizer=str(CASES / "_tokenizers" / "byte257"))
    with pytest.raises(InputError, match=r"a\.jsonl changed while it was read"):
        INGEST.run(config, store=ArtifactStore(tmp_path / "store", output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert INGEST.run(config, store=ArtifactStore(tmp_path / "store", output=tmp_path / "out")).summary["documents"]


def test_folders_behind_links_are_read_once_and_loops_end(tmp_path: Path):
    write(tmp_path / "real" / "y.jsonl", "b")
    write(tmp_path / "data" / "x.jsonl", "a")
    (tmp_path / "data" / "sub").symlink_to(tmp_path / "real")
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    assert ingest_files([str(tmp_path / "data")], tmp_path / "out").summary["documents"] == 2


def test_a_link_to_nothing_is_an_error(tmp_path: Path):
    write(tmp_path / "data" / "x.jsonl", "a")
    (tmp_path / "data" / "y.jsonl").symlink_to(tmp_path / "gone.jsonl")
    for source in (tmp_path / "data", tmp_path / "data" / "*.jsonl"):
        with pytest.raises(ConfigError, match=r"y\.jsonl is a link to .*gone\.jsonl, which is not there"):
            ingest_files([str(source)], tmp_path / "out")


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_to_data_in_an_archive_is_an_error(tmp_path: Path, mode: str, kind: bytes):
    with tarfile.open(tmp_path / "a.tar", mode) as archive:  # type: ignore[call-overload]
        data = b'{"text": "a"}\n'
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("b.jsonl")
        link.type, link.linkname = kind, "a.jsonl"
        archive.addfile(link)
    with pytest.raises(InputError, match=r"b\.jsonl at byte \d+ is a link"):
        ingest_files([str(tmp_path / "a.tar")], tmp_path / "out")


@pytest.mark.parametrize("length", ["²", "9" * 5000, "١٦"])
def test_a_warc_length_that_is_no_number_is_damage(tmp_path: Path, length: str):
    text = f"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: {length}\r\n\r\nabc\r\n\r\n"
    (tmp_path / "a.warc").write_text(text, encoding="utf-8", newline="")
    with pytest.raises(InputError, match="without its length"):
        ingest_files([str(tmp_path / "a.warc")], tmp_path / "out")


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": (1e308, 1e308), "samples": 10},
        {"objective": "bert", "seq_length": 2},
        {"epochs": (1e300, 1.0)},
        {"tokens": (10**20,)},
    ],
)
def test_extreme_settings_of_an_index_are_refused(settings: dict[str, object]):
    with pytest.raises(ValueError, match=r"weights|8 tokens or more|more than an index can hold"):
        IndexConfig(**settings)  # type: ignore[arg-type]


def test_the_window_of_a_long_encoder_is_found_at_once():
    for seq_length, config in ((512, T5Config()), (10**10, T5Config(noise_density=0.999999))):
        found = lengths_for_encoder(seq_length, config)
        assert found.encoder <= seq_length < lengths_of_window(found.window + 1, config).encoder
