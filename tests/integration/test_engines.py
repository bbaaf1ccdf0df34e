"""Engines in the ingest stage: the same bytes by each, and nothing kept of one that is wrong."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ingest_cases import assert_outcome, case_path, expected, ingest_files
from tokenizer_texts import HARD_TEXTS, TRAINING_TEXTS, byte_level_definition

from contracts.artifact import Artifact
from contracts.errors import ConfigError
from contracts.store import ArtifactStore
from preprocessing.config import IngestConfig
from preprocessing.ingestion.ingest import INGEST
from preprocessing.tokenization import engines as engines_module
from preprocessing.tokenization.engines import ENGINES, EngineKind
from preprocessing.tokenization.reference_engine import Ids, Lengths, ReferenceEngine
from preprocessing.tokenization.tokenizer import Tokenizer

MARK = "zebra-crossing"


@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize(
    ("case", "file", "part", "settings"),
    [
        ("ING-16", "corpus.jsonl", "replace", {"invalid_unicode": "replace"}),
        ("ING-20", "nul_in_text.jsonl", "nul_in_text", {}),
        ("ING-22", "corpus.jsonl", "no_bos", {"tokenizer": "byte258_bos"}),
        ("ING-22", "corpus.jsonl", "bos", {"tokenizer": "byte258_bos", "add_bos": True}),
        ("ING-24", "corpus.jsonl", None, {"tokenizer": "word65550"}),
        ("ING-45", "corpus.jsonl", "byte257", {}),
        ("ING-45", "corpus.jsonl", "byte257_nfc", {"tokenizer": "byte257_nfc"}),
    ],
)
def test_the_cases_have_their_bytes_by_every_engine(
    tmp_path: Path, engine: str, case: str, file: str, part: str | None, settings: dict[str, Any]
):
    artifact = ingest_files(case_path(case, file), tmp_path / "out", engine=engine, **settings)

    assert_outcome(artifact, expected(case) if part is None else expected(case)[part])
    assert artifact.summary["engines"]["barred"] == []


SLOW = {"tiktoken", "pieces", "tokenizers"}  # with so long a word, over ten seconds


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ENGINES]
)
def test_ing_37_one_document_of_32_mib_by_every_engine(tmp_path: Path, engine: str):
    artifact = ingest_files(case_path("ING-37", "one_doc.jsonl.zst"), tmp_path / "out", engine=engine, workers=1)

    assert_outcome(artifact, {**expected("ING-37"), "tokens": 33_554_438})


@pytest.mark.parametrize("engine", list(ENGINES))
def test_ing_37_time_is_linear_in_the_length_of_a_word(engine: str):
    tokenizer = Tokenizer(json.dumps(byte_level_definition()), {}, "test")
    encode = engines_module.make_engine(engine, tokenizer).encode
    letters = random.Random(1).choices("abcdefgh", k=2**19)

    def seconds(size: int) -> float:
        text = "".join(letters[:size])
        start = time.process_time()
        encode([text])
        return time.process_time() - start

    seconds(2**12)
    assert seconds(2**19) < 16 * max(seconds(2**17), 0.01)  # 4 times as long; the square would be 16


def hard_corpus(path: Path, *, documents: int = 600) -> Path:
    """Documents that differ from each other, so that about one in 256 is in the running sample."""
    choose = random.Random(5)
    texts = [" ".join(choose.choices(HARD_TEXTS[:-2], k=6)) + f" {n}" for n in range(documents)]
    texts += TRAINING_TEXTS[-2:]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(byte_level_definition()))
    return folder


def ingest(source: Path, tokenizer: Path, output: Path, **settings: Any) -> Artifact:
    config = IngestConfig(sources=(str(source),), tokenizer=str(tokenizer), **settings)
    return INGEST.run(config, store=ArtifactStore(output.parent / f"{output.name}-store", output=output))


def test_every_engine_gives_the_same_dataset(tmp_path: Path, tokenizer_path: Path):
    source = hard_corpus(tmp_path / "a.jsonl")
    made = {
        engine: ingest(source, tokenizer_path, tmp_path / engine, engine=engine, shard_tokens=20_000)
        for engine in ENGINES
    }

    assert len({artifact.manifest.content for artifact in made.values()}) == 1
    assert len({artifact.fingerprint for artifact in made.values()}) == 1
    assert all(list(made[engine].summary["engines"]["used"]) == [engine] for engine in ENGINES)


class _Wrong:
    """The reference, but for what `spoil` does to the ids of documents that hold MARK."""

    name = "gigatoken"

    def __init__(self, tokenizer: Tokenizer, spoil: Callable[[list[int]], list[int]]) -> None:
        self._reference = ReferenceEngine(tokenizer)
        self._spoil = spoil

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        found = [self._reference.encode([text])[0] for text in texts]
        spoiled = [self._spoil(ids.tolist()) if MARK in text else ids for text, ids in zip(texts, found, strict=True)]
        lengths = np.array([len(ids) for ids in spoiled], dtype=np.int64)
        return np.concatenate([np.asarray(ids, dtype=np.uint32) for ids in spoiled]), lengths


def use_wrong_engine(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[list[int]], list[int]]) -> None:
    kind = EngineKind(lambda tokenizer: _Wrong(tokenizer, spoil), "gigatoken")
    monkeypatch.setitem(ENGINES, "gigatoken", kind)  # type: ignore[arg-type]


def one_id_changed(ids: list[int]) -> list[int]:
    return [*ids[:-1], ids[-1] ^ 1]


def marked_corpus(folder: Path, *, line: int) -> Path:
    """A corpus in which the document of one line, far from the start of any piece, holds MARK."""
    source = hard_corpus(folder / "a.jsonl")
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[line - 1] = json.dumps({"text": f"a {MARK} here"}) + "\n"
    source.write_text("".join(lines), encoding="utf-8")
    return source


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("data-*")}


def test_one_wrong_id_in_a_rare_document_bars_the_engine_and_nothing_of_it_is_kept(
    tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = marked_corpus(tmp_path, line=577)
    good = ingest(source, tokenizer_path, tmp_path / "good", engine="tokenizers", shard_tokens=5000)
    use_wrong_engine(monkeypatch, one_id_changed)
    monkeypatch.setattr("preprocessing.ingestion.engine_choice.PLACE_CHARACTERS", 1)

    made = ingest(source, tokenizer_path, tmp_path / "made", engine="gigatoken", shard_tokens=5000)

    assert files_of(made.path) == files_of(good.path)
    assert made.manifest.content == good.manifest.content
    (barred,) = made.summary["engines"]["barred"]
    assert (barred["engine"], "a.jsonl" in barred["place"]) == ("gigatoken", True)
    assert list(made.summary["engines"]["used"]) == ["tokenizers"]


def test_what_a_barred_engine_made_before_is_done_again(
    tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In the first part the engine cuts the text otherwise, unseen; in the last it is found out."""
    source = marked_corpus(tmp_path, line=60)
    with source.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": f"a {MARK} again, with one of its ids changed"}) + "\n")
    settings = {"part_bytes": source.stat().st_size // 5, "workers": 1}
    good = ingest(source, tokenizer_path, tmp_path / "good", engine="tokenizers", **settings)

    from preprocessing.tokenization.loading import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_path)

    def spoil(ids: list[int]) -> list[int]:
        if "changed" in tokenizer.decode(ids):
            return one_id_changed(ids)
        return [tokenizer.encode(letter)[0] for letter in tokenizer.decode(ids)]  # ASCII: one token each

    use_wrong_engine(monkeypatch, spoil)
    monkeypatch.setattr("preprocessing.ingestion.engine_choice.PLACE_CHARACTERS", 1)
    monkeypatch.setattr("preprocessing.ingestion.ingest.run_here", _run_in_process)
    made = ingest(source, tokenizer_path, tmp_path / "made", engine="gigatoken", **settings)

    assert len(files_of(good.path)) > 4
    assert files_of(made.path) == files_of(good.path)
    assert "first audit" not in made.summary["engines"]["barred"][0]["place"]
    assert list(made.summary["engines"]["used"]) == ["tokenizers"]


def _run_in_process(job: Any, numbers: Sequence[int], *, workers: int, tell: Any) -> Any:
    from preprocessing.ingestion.executors import run_here

    return run_here(job, numbers, workers=0, tell=tell)


def test_an_engine_that_differs_in_the_first_audit_is_never_used(
    tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = marked_corpus(tmp_path, line=1)
    use_wrong_engine(monkeypatch, one_id_changed)
    monkeypatch.setattr("preprocessing.tokenization.engines.FAST_ABOVE_BYTES", 0)

    made = ingest(source, tokenizer_path, tmp_path / "made")

    assert [item["place"] for item in made.summary["engines"]["barred"]] == ["text 1 of the first audit"]
    assert list(made.summary["engines"]["used"]) == ["fastokens"]


def test_a_fast_engine_is_not_started_for_a_small_input(tmp_path: Path, tokenizer_path: Path):
    made = ingest(hard_corpus(tmp_path / "a.jsonl"), tokenizer_path, tmp_path / "made")
    assert list(made.summary["engines"]["used"]) == ["pieces"]


def test_an_engine_that_is_not_installed_is_named_with_its_cure(
    tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = hard_corpus(tmp_path / "a.jsonl")
    monkeypatch.setattr("preprocessing.tokenization.engines.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ingest\.engine is tiktoken, but .*Install shardline\[tiktoken\]"):
        ingest(source, tokenizer_path, tmp_path / "made", engine="tiktoken")


def test_an_engine_that_cannot_run_the_tokenizer_gives_way(tmp_path: Path):
    made = ingest_files(case_path("ING-24", "corpus.jsonl"), tmp_path / "out", tokenizer="word65550", engine="tiktoken")
    assert list(made.summary["engines"]["used"]) == ["tokenizers"]


GROWTH = """
import json, random, sys
sys.path.insert(0, "tests/support")
from tokenizer_texts import byte_level_definition
import preprocessing.tokenization.fast_engines as fast
from preprocessing.tokenization.tokenizer import Tokenizer
fast.REBUILD_CHARACTERS = 2**21
tokenizer = Tokenizer(json.dumps(byte_level_definition()), {}, "test")
engine = getattr(fast, sys.argv[1] + "_engine")(tokenizer, cache_bytes=24 * 2**20)
choose = random.Random(3)
peaks = []
for _ in range(24):
    engine.encode(["".join(choose.choices("abcdefghij ", k=20_000)) for _ in range(50)])
    peaks.append(fast.resident_bytes())
print(max(peaks[12:]) - max(peaks[:12]), engine.num_builds)
"""


def test_ing_38_memory_levels_off_on_texts_that_never_repeat():
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, "gigatoken"], cwd=root, capture_output=True, text=True, check=True
    )
    growth, builds = map(int, done.stdout.split())
    assert growth < 16 * 2**20
    assert builds > 1
