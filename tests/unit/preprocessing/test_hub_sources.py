"""Datasets of the hub and folders of `save_to_disk`; the hub's own code loads a local folder here, without network."""

import json
import os
from pathlib import Path

import datasets
import pytest
from packed_files import FORM, TEXTS, json_lines, texts_of

from contracts.errors import ConfigError
from preprocessing.reading.blocks import Position
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.hub import hub_identity, is_hub_address
from preprocessing.reading.pieces import cut_file, piece_blocks
from preprocessing.reading.records import parse_block
from preprocessing.reading.sources import SourceSettings, expand_sources, raw_source_identities


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train-0.jsonl").write_bytes(json_lines(TEXTS[:3]))
    (folder / "train-1.jsonl").write_bytes(json_lines(TEXTS[3:]))
    (folder / "test.jsonl").write_bytes(json_lines(["a test"]))
    return f"hf://{folder}:train"


def test_a_split_of_a_dataset_is_streamed(address: str):
    (source,) = expand_sources([address])
    assert source.name == "corpus/train"
    assert texts_of(source) == TEXTS
    (test,) = expand_sources([address.replace(":train", ":test")])
    assert texts_of(test) == ["a test"]


def test_the_shards_of_a_dataset_are_its_pieces(address: str):
    (source,) = expand_sources([address])
    pieces = cut_file(source, 0, piece_bytes=1, form=FORM)
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 1), (1, None)]
    found = [
        [
            text
            for block in piece_blocks(source, piece, Position(), form=FORM)
            for text in parse_block(block, FORM).texts
        ]
        for piece in pieces
    ]
    assert found == [TEXTS[:3], TEXTS[3:]]
    (rest,) = piece_blocks(source, pieces[0], Position(0, 3), form=FORM)
    assert (rest.start.line, parse_block(rest, FORM).texts) == (3, TEXTS[2:3])


def test_a_version_of_a_dataset_is_told_by_its_files(address: str):
    identity = raw_source_identities([address], SourceSettings())
    assert identity == {"source000000/corpus/train": hub_identity(address)}
    assert hub_identity(address.replace(":train", ":test")) != hub_identity(address)
    file = Path(address.removeprefix("hf://").removesuffix(":train")) / "train-0.jsonl"
    file.write_bytes(json_lines(TEXTS[:2]))
    os.utime(file, ns=(1, 1))
    (source,) = expand_sources([address])
    assert raw_source_identities([address], SourceSettings()) != identity
    assert texts_of(source) == TEXTS[:2] + TEXTS[3:]


def test_a_damaged_file_of_a_dataset_names_the_shard(address: str, tmp_path: Path):
    (tmp_path / "corpus" / "train-1.jsonl").write_bytes(b'{"text": "a"}\n{"te')
    (source,) = expand_sources([address])
    with pytest.raises(DamagedStreamError, match=r"corpus/train: shard 1 of 2 cannot be read after row 3"):
        texts_of(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("hf://owner/name", "is no address of a dataset. Write hf://OWNER/NAME:SPLIT"),
        ("hf://nobody-has/this-name:train", "hf://nobody-has/this-name: cannot be loaded"),
    ],
)
@pytest.mark.usefixtures("address")
def test_an_address_that_cannot_be_loaded_says_why(source: str, reason: str):
    with pytest.raises(ConfigError, match=reason):
        expand_sources([source])


def test_a_split_that_is_not_there_says_which_there_are(address: str):
    with pytest.raises(ConfigError, match=r"valid.*Available splits: \['train', 'test'\]|valid.*train"):
        expand_sources([address.replace(":train", ":valid")])


def test_a_file_of_a_dataset_is_no_dataset():
    assert not is_hub_address("hf://datasets/owner/name/a.parquet")
    assert is_hub_address("hf://owner/name/config:train")


def save(folder: Path, texts: list[str] = TEXTS, shards: int = 2) -> None:
    rows = datasets.Dataset.from_list([json.loads(line) for line in json_lines(texts).splitlines()])
    rows.save_to_disk(folder, num_shards=shards)


def test_a_folder_of_save_to_disk_is_the_files_it_lists(tmp_path: Path):
    save(tmp_path / "saved")
    (tmp_path / "saved" / "cache-1.arrow").write_bytes(b"what map() kept")
    for place in (tmp_path / "saved", tmp_path):
        files = expand_sources([str(place)])
        assert [file.name.removeprefix("saved/") for file in files] == [
            "data-00000-of-00002.arrow",
            "data-00001-of-00002.arrow",
        ]
        assert [text for file in files for text in texts_of(file)] == TEXTS


def test_a_folder_of_splits_gives_the_one_that_is_asked_for(tmp_path: Path):
    both = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "validation")}
    )
    both.save_to_disk(tmp_path / "saved")
    for name in ("train", "validation"):
        (file,) = expand_sources([str(tmp_path / "saved")], SourceSettings(part=name))
        assert texts_of(file) == [name]
    with pytest.raises(ConfigError, match="has no split 'test'; it has train, validation"):
        expand_sources([str(tmp_path / "saved")], SourceSettings(part="test"))


def test_a_saved_folder_without_one_of_its_files_is_an_error(tmp_path: Path):
    save(tmp_path / "saved")
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ConfigError, match=r"names data-00001-of-00002.arrow, which is not there"):
        expand_sources([str(tmp_path / "saved")])
