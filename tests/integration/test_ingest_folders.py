"""The cases ING-09, 34 and 42: odd columns, namesakes of equal size and time, many parts for few workers."""

import json
import os
from pathlib import Path

import pytest
from ingest_cases import CASES, assert_outcome, case_path, expected, ingest_files

from contracts.artifact import Artifact
from contracts.errors import InputError
from contracts.store import ArtifactStore
from preprocessing.config import IndexConfig, IngestConfig
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.gpt import GPTSamples
from preprocessing.stages import INDEX, INGEST


def test_ing_09_a_column_of_nulls_and_then_text_is_nobodys_business(tmp_path: Path):
    assert_outcome(ingest_files(case_path("ING-09", "corpus.jsonl.zst"), tmp_path / "out"), expected("ING-09"))


def test_ing_34_two_files_of_equal_size_and_time_share_no_cache(tmp_path: Path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_bytes((CASES / "ING-34" / "data" / name).read_bytes())
        os.utime(folder / name, (1_700_000_000, 1_700_000_000))
    assert len({(folder / name).stat().st_size for name in ("a.jsonl", "b.jsonl")}) == 1

    def chain(name: str) -> tuple[Artifact, Artifact]:
        store = ArtifactStore(tmp_path / "store")
        config = IngestConfig(
            sources=(str(folder / f"{name}.jsonl"),), tokenizer=str(CASES / "_tokenizers" / "byte257")
        )
        dataset = INGEST.run(config, store=store, label="same")
        index = INDEX.run(IndexConfig(seq_length=8), inputs={"dataset0": dataset}, store=store, label="same")
        return dataset, index

    for name in ("a", "b"):
        dataset, index = chain(name)
        assert_outcome(dataset, expected("ING-34")[name])
        assert TokenDataset(dataset.path).document(0)[0] == ord(name)
        assert ord("a" if name == "b" else "b") not in GPTSamples(index.path, "train").tokens([0, 1, 2])


@pytest.mark.parametrize(
    "settings", [{"workers": 1}, {"workers": 3}, {"workers": 4}, {"workers": 3, "part_bytes": 100}]
)
def test_ing_42_parts_come_in_the_order_of_their_names_for_any_workers(tmp_path: Path, settings: dict[str, int]):
    found = ingest_files(case_path("ING-42", "parts"), tmp_path / "out", **settings)
    wanted = expected("ING-42")["lexicographic"]
    if "part_bytes" not in settings:
        assert_outcome(found, wanted)
    tokens = b"".join(path.read_bytes() for path in sorted(found.path.glob("*.bin")))
    assert (found.summary["documents"], len(tokens)) == (wanted["documents"], wanted["bin_bytes"])
    assert [source["name"] for source in found.summary["sources"]][:3] == [
        "part_0.jsonl.gz",
        "part_1.jsonl.gz",
        "part_10.jsonl.gz",
    ]


def test_a_subset_that_no_document_has_is_an_error_that_names_those_there_are(tmp_path: Path):
    lines = [json.dumps({"text": f"of {name}", "meta": {"pile_set_name": name}}) for name in ("x", "y", 7)]
    (tmp_path / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(InputError, match=r"of the subset 'zzz'\. Subsets in the sources: 7, x, y"):
        ingest_files([str(tmp_path / "a.jsonl")], tmp_path / "out", subsets=("x", "zzz"))
    assert not (tmp_path / "out").exists()
    assert list(ingest_files([str(tmp_path / "a.jsonl")], tmp_path / "one", subsets=("7",)).summary["subsets"]) == ["7"]
