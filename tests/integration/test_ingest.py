"""The ingest stage as a user runs it: workers, shards, resume after kill -9, quarantine."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import texts, write_corpus
from ingest_cases import CASES, ingest_files

from contracts.errors import ConfigError, RecordError
from contracts.store import ArtifactStore
from preprocessing.config import CorpusConfig, IngestConfig
from preprocessing.corpus.gather import CORPUS
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.ingestion.ingest import INGEST
from preprocessing.reading import pieces


def content(folder: Path) -> dict[str, bytes]:
    """Files of a dataset whose bytes must not depend on how it was made."""
    kinds = (".bin", ".idx", ".jsonl", ".parquet")
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*")) if path.suffix in kinds}


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    original = pieces.piece_blocks

    def small(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "block_bytes": 3000})

    monkeypatch.setattr("preprocessing.ingestion.parts.piece_blocks", small)


@pytest.mark.usefixtures("_small_blocks")
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path):
    sources = [
        str(write_corpus(tmp_path / "a.jsonl", texts(300, seed=1))),
        str(write_corpus(tmp_path / "b.jsonl.gz", texts(200, seed=2))),
    ]
    made = [
        content(ingest_files(sources, tmp_path / f"out{workers}", workers=workers, shard_tokens=7000).path)
        for workers in (None, 1, 3)
    ]

    assert len([name for name in made[0] if name.endswith(".bin")]) > 3
    assert made[0] == made[1] == made[2]


def test_shards_are_one_dataset_with_the_documents_in_order(tmp_path: Path):
    documents = texts(200)
    source = write_corpus(tmp_path / "a.jsonl", documents)
    artifact = ingest_files([str(source)], tmp_path / "out", shard_tokens=5000)

    dataset = TokenDataset(artifact.path)
    assert len(dataset.shards) > 3
    assert all(shard.num_tokens <= 5000 for shard in dataset.shards)
    assert dataset.num_documents == artifact.summary["documents"] == 200
    found = [dataset.tokenizer.decode(dataset.document(n)[:-1]) for n in range(200)]
    assert found == documents
    rows = dataset.document_rows(np.arange(200))
    lines = source.read_text(encoding="utf-8").split("\n")
    assert [json.loads(lines[row["line"] - 1])["text"] for row in rows] == documents
    assert [row["tokens"] for row in rows] == dataset.lengths.tolist()
    assert {row["subset"] for row in rows} == {"Set0", "Set1"}
    assert sum(counts["tokens"] for counts in artifact.summary["subsets"].values()) == dataset.num_tokens


_RUN = """
import sys, time
from pathlib import Path
from contracts.store import ArtifactStore
from preprocessing.ingestion import shards
from preprocessing.config import IngestConfig
from preprocessing.ingestion.ingest import INGEST
sources, tokenizer, output = sys.argv[1].split(","), sys.argv[2], Path(sys.argv[3])
close = shards.ShardWriter._close_shard
def slowly(self, position, **more):
    close(self, position, **more)
    time.sleep(0.05)
shards.ShardWriter._close_shard = slowly
config = IngestConfig(sources=sources, tokenizer=tokenizer, shard_tokens=8000, workers=2, on_error="quarantine")
INGEST.run(config, store=ArtifactStore(output.parent / "store", output=output))
"""


def _start(sources: list[Path], output: Path) -> "subprocess.Popen[bytes]":
    arguments = [",".join(map(str, sources)), str(CASES / "_tokenizers" / "byte257"), str(output)]
    return subprocess.Popen([sys.executable, "-c", _RUN, *arguments], cwd=Path(__file__).parent.parent.parent)


def test_a_killed_run_goes_on_at_the_last_finished_shard(tmp_path: Path):
    bad = write_corpus(tmp_path / "a.jsonl", texts(500, seed=1))
    with bad.open("a", encoding="utf-8") as file:
        file.write('{"other": 1}\n' * 3)
    sources = [bad, write_corpus(tmp_path / "b.jsonl.gz", texts(400, seed=2))]
    whole = _start(sources, tmp_path / "whole")
    assert whole.wait(timeout=120) == 0

    for _ in range(2):
        process = _start(sources, tmp_path / "killed")
        deadline = time.monotonic() + 60
        shards = len(list((tmp_path / "killed").rglob("*.idx")))
        while len(list((tmp_path / "killed").rglob("*.idx"))) < shards + 4 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
        if (tmp_path / "killed" / "manifest.json").exists():
            break
    kept = {path.stat().st_mtime_ns for path in (tmp_path / "killed").rglob("*.idx")}
    last = _start(sources, tmp_path / "killed")
    assert last.wait(timeout=120) == 0

    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert len(kept - {path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*.idx")}) <= 1
    summaries = [json.loads((tmp_path / name / "manifest.json").read_text())["summary"] for name in ("whole", "killed")]
    assert summaries[0] == summaries[1]
    assert summaries[0]["rejected"] == 3
    assert not list((tmp_path / "killed").glob("*.tmp"))
    assert not (tmp_path / "killed" / "unfinished").exists()


def test_no_worker_outlives_a_killed_parent(tmp_path: Path):
    process = _start([write_corpus(tmp_path / "a.jsonl", texts(2000))], tmp_path / "out")
    deadline = time.monotonic() + 60
    while not (children := _children(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)

    assert children
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def test_parquet_gives_the_bytes_of_the_same_texts_in_jsonl(tmp_path: Path):
    documents = texts(150)
    write_corpus(tmp_path / "a.jsonl", documents)
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()]
    table = pa.table(
        {"text": [row["text"] for row in rows], "meta": [row.get("meta") for row in rows], "n": range(len(rows))}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=40)

    from_lines = ingest_files([str(tmp_path / "a.jsonl")], tmp_path / "lines")
    from_rows = ingest_files([str(tmp_path / "a.parquet")], tmp_path / "rows")

    assert (from_lines.path / "data-00000.bin").read_bytes() == (from_rows.path / "data-00000.bin").read_bytes()
    assert from_rows.summary["subsets"] == from_lines.summary["subsets"]
    assert from_rows.summary["lines"] == from_lines.summary["lines"] == len(rows)


def test_a_null_text_in_parquet_names_its_row(tmp_path: Path):
    pq.write_table(pa.table({"text": ["one", None]}), tmp_path / "a.parquet")

    with pytest.raises(RecordError, match=r"a\.parquet, line 2: 'text' is null"):
        ingest_files([str(tmp_path / "a.parquet")], tmp_path / "out")


def test_special_tokens_in_text_are_text_and_are_counted(tmp_path: Path):
    write_corpus(tmp_path / "a.jsonl", ["one<|endoftext|>two"])
    artifact = ingest_files([str(tmp_path / "a.jsonl")], tmp_path / "out")

    assert artifact.summary["special_tokens_in_text"] == 1
    assert TokenDataset(artifact.path).sequence(0).tolist() == [*b"one<|endoftext|>two", 256]


def test_keys_that_are_no_unicode_are_listed_among_the_rejects(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"\\ud800": 1}\n{"text": "a"}\n')
    artifact = ingest_files([str(tmp_path / "a.jsonl")], tmp_path / "out", on_error="quarantine", shard_tokens=1)

    (line,) = (artifact.path / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["reason"] == "no key 'text'; keys present: \ud800"


def test_a_corpus_artifact_is_ingested_by_part_and_never_trains_on_held_out_documents(tmp_path: Path):
    write_corpus(tmp_path / "a.jsonl", texts(300))
    store = ArtifactStore(tmp_path / "store")
    corpus = CORPUS.run(CorpusConfig(sources=(str(tmp_path / "a.jsonl"),), heldout_fraction=0.3), store=store)
    tokenizer = str(CASES / "_tokenizers" / "byte257")

    train = INGEST.run(IngestConfig(tokenizer=tokenizer), inputs={"corpus": corpus}, store=store)
    heldout = INGEST.run(
        IngestConfig(tokenizer=tokenizer, corpus_part="heldout"), inputs={"corpus": corpus}, store=store
    )
    by_path = ingest_files([str(corpus.path)], tmp_path / "out")

    assert train.summary["documents"] + heldout.summary["documents"] == 300
    assert heldout.summary["documents"] == corpus.summary["heldout_documents"] > 50
    assert by_path.summary["documents"] == train.summary["documents"]
    digests = [set(pq.read_table(a.path / "documents.parquet").column("digest").to_pylist()) for a in (train, heldout)]
    assert not digests[0] & digests[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": ("nothing-here.jsonl",), "tokenizer": "T"}, "there is no file or folder 'nothing-here.jsonl'"),
        ({"sources": (), "tokenizer": "T"}, "no input. Set ingest.sources"),
        ({"sources": ("S",)}, "no tokenizer. Set ingest.tokenizer"),
        ({"sources": ("S",), "tokenizer": "no-such-folder"}, "there is no tokenizer here"),
        ({"sources": ("S",), "tokenizer": "T", "eod_token": "<nope>"}, "has no such token"),
        ({"sources": ("S",), "tokenizer": "T", "add_bos": True}, "defines no BOS token"),
    ],
)
def test_wrong_settings_are_refused_with_the_cure(tmp_path: Path, settings: dict[str, Any], message: str):
    places = {"T": str(CASES / "_tokenizers" / "byte257"), "S": str(write_corpus(tmp_path / "a.jsonl", ["x"]))}
    filled = {
        key: tuple(places.get(item, item) for item in value) if isinstance(value, tuple) else places.get(value, value)
        for key, value in settings.items()
    }
    with pytest.raises(ConfigError) as caught:
        INGEST.run(IngestConfig(**filled), store=ArtifactStore(tmp_path / "store", output=tmp_path / "out"))

    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_subsets_are_kept_as_they_are_in_the_table(tmp_path: Path):
    names = ["a", None, "é", "", "a"] * 5
    lines = [json.dumps({"text": "x", **({} if name is None else {"meta": {"pile_set_name": name}})}) for name in names]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    artifact = ingest_files([str(tmp_path / "a.jsonl")], tmp_path / "out", shard_tokens=6)

    table = pq.read_table(artifact.path / "documents.parquet")
    assert table.column("subset").to_pylist() == [name or None for name in names]
    assert table.column("document").to_pylist() == list(range(25))
    assert table.column("shard").to_pylist() == [n // 3 for n in range(25)]
    assert set(table.column("file").to_pylist()) == {"a.jsonl"}
    table.validate(full=True)


def test_ingest_imports_no_pandas(tmp_path: Path):
    write_corpus(tmp_path / "a.jsonl", texts(20))
    code = "import sys; from ingest_cases import ingest_files; from pathlib import Path\n"
    code += "ingest_files([sys.argv[1]], Path(sys.argv[2])); print(sorted({'pandas', 'torch'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests" / "support")])}
    command = [sys.executable, "-c", code, str(tmp_path / "a.jsonl"), str(tmp_path / "out")]

    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "[]\n"
