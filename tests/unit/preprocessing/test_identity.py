"""Identity of the stages' artifacts: what changes it, what does not, and that a refactor keeps it."""

from pathlib import Path

import pytest

from contracts.configuration import Settings, identity
from contracts.fingerprint import Recipe
from contracts.store import ArtifactStore
from preprocessing.cleaning.config import CleanConfig, MinHashConfig
from preprocessing.config import CorpusConfig, IndexConfig, IngestConfig, TokenizerConfig
from preprocessing.stages import CLEAN, CORPUS, INDEX, INGEST, TOKENIZER

# Changed on purpose only, by hand, when a stage gives another result and its version is raised.
GOLDEN = {
    "corpus": "3302d28b0da9ecd8ddf64eb4d0a60fd1",
    "clean": "32051ed913970ce61020df0c0a7ba228",
    "tokenizer": "0cdcdfc079400ca9053d71f36945383e",
    "ingest": "481bae3ee644044b8c9bff6912dca7b0",
    "index": "9bf119cdcacdd0f567d61c03bafbcedf",
}
STAGES = {
    "corpus": (CORPUS, CorpusConfig()),
    "clean": (CLEAN, CleanConfig(exact=True, minhash=MinHashConfig())),
    "tokenizer": (TOKENIZER, TokenizerConfig()),
    "ingest": (INGEST, IngestConfig()),
    "index": (INDEX, IndexConfig()),
}


def fingerprint(name: str, settings: Settings) -> str:
    stage = STAGES[name][0]
    return Recipe(stage.name, stage.version, identity(settings), {"input": "0" * 32}, {"raw": "f" * 64}).fingerprint


@pytest.mark.parametrize("name", list(STAGES))
def test_default_settings_keep_their_fingerprint(name: str):
    assert fingerprint(name, STAGES[name][1]) == GOLDEN[name]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ingest", IngestConfig(workers=7, sources=("elsewhere/*.jsonl",), tokenizer="elsewhere")),
        ("corpus", CorpusConfig(sources=("a.jsonl",))),
        ("tokenizer", TokenizerConfig(sources=("a.jsonl",))),
        ("index", IndexConfig(datasets=("a",))),
    ],
)
def test_places_and_workers_are_no_part_of_the_identity(name: str, settings: Settings):
    assert fingerprint(name, settings) == GOLDEN[name]


@pytest.mark.parametrize(
    "settings",
    [
        IngestConfig(append_eod=False),
        IngestConfig(on_error="quarantine"),
        IngestConfig(shard_tokens=5),
        IngestConfig(text_key="t"),
    ],
)
def test_what_changes_the_dataset_changes_its_fingerprint(settings: IngestConfig):
    assert fingerprint("ingest", settings) != GOLDEN["ingest"]


def test_the_order_of_sources_is_part_of_the_identity_and_their_place_is_not(tmp_path: Path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for name in ("a.jsonl", "b.jsonl"):
            (tmp_path / folder / name).write_text(f'{{"text": "{name}"}}\n')
    store = ArtifactStore(tmp_path / "store")

    def of(*names: str) -> str:
        settings = IngestConfig(sources=tuple(str(tmp_path / name) for name in names))
        return INGEST.recipe(settings, inputs={}, store=store).fingerprint

    assert of("one/a.jsonl", "one/b.jsonl") == of("two") == of("two/*.jsonl")
    assert of("one/a.jsonl", "one/b.jsonl") != of("one/b.jsonl", "one/a.jsonl")
