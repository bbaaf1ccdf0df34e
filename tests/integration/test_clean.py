"""The clean stage: planted documents are found and no others, whatever the workers, and all are accounted for."""

import gzip
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from cleaning_corpora import PASSAGE, dropped, everything, kept, planted, prose, run_clean, write_lines
from command_line import shardline
from corpora import texts, write_corpus
from ingest_cases import CASES
from processes import kill_at, run_forked

from contracts.artifact import read_artifact
from contracts.errors import ConfigError, InputError, RecordError
from contracts.store import ArtifactStore
from preprocessing.config import CorpusConfig, IngestConfig
from preprocessing.corpus.gather import CORPUS
from preprocessing.ingestion.ingest import INGEST
from preprocessing.reading.damage import DamagedStreamError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": PASSAGE, "answer": "Two, it is said."}) + "\n")
    return path


def evaluated(evaluation: Path) -> dict[str, object]:
    return {"decontaminate": [str(evaluation)], "decontaminate_keys": ["question", "answer"]}


def test_every_planted_document_is_found_and_no_other(tmp_path: Path, evaluation: Path):
    documents, expected = planted()
    source = write_lines(tmp_path / "a.jsonl", documents)

    corpus = run_clean(everything(sources=[str(source)], **evaluated(evaluation)), tmp_path / "out")

    rows = dropped(corpus)
    assert {row["line"] - 1: row["step"] for row in rows} == expected
    lines = source.read_bytes().splitlines(keepends=True)
    for row in rows:
        assert row["file"] == "a.jsonl"
        assert row["byte_offset"] == sum(map(len, lines[: row["line"] - 1]))
        assert row["bytes"] == len(documents[row["line"] - 1].encode())
        assert row["subset"] == ("One", "Two")[(row["line"] - 1) % 2]
        assert (row["of"] is not None) == (row["step"] in ("exact", "near"))
    first = next(row for row in rows if row["step"] == "exact")
    assert (first["of"], first["reason"]) == ("a.jsonl:1", "exact duplicate")
    records = kept(corpus)
    assert [record.text for record in records] == [
        text for number, text in enumerate(documents) if number not in expected
    ]


def test_every_line_is_accounted_for(tmp_path: Path, evaluation: Path):
    documents, expected = planted()
    source = write_lines(tmp_path / "a.jsonl", documents)
    other = tmp_path / "b.jsonl"
    other.write_text('{"text": ""}\n\nno json\n{"text": 1}\n' + json.dumps({"text": prose(random.Random(9))}) + "\n")

    settings = everything(sources=[str(source), str(other)], on_error="quarantine", **evaluated(evaluation))
    corpus = run_clean(settings, tmp_path / "out")

    summary = corpus.summary
    assert summary["lines"] == len(documents) + 5
    for counts in (summary, *summary["sources"]):
        assert counts["lines"] == sum(counts[name] for name in ("documents", "empty", "filtered", "rejected"))
    assert (summary["empty"], summary["rejected"], summary["filtered"]) == (2, 2, len(expected))
    assert sum(summary["filtered_by"].values()) == len(expected)
    steps = {step: sum(reasons.values()) for step, reasons in summary["dropped"].items()}
    assert steps == {step: list(expected.values()).count(step) for step in set(expected.values())}
    assert sum(sum(of.values()) for of in summary["dropped_subsets"].values()) == len(expected)
    assert summary["documents"] == summary["train_documents"] == len(kept(corpus))
    assert sum(of["documents"] for of in summary["subsets"]["train"].values()) == summary["documents"]
    rejects = [json.loads(line) for line in (corpus.path / "rejects.jsonl").read_text().splitlines()]
    assert [(row["file"], row["line"], row["byte_offset"]) for row in rejects] == [
        ("b.jsonl", 3, 14),
        ("b.jsonl", 4, 22),
    ]


@pytest.mark.parametrize("workers", [None, 1, 2])
def test_the_bytes_do_not_depend_on_workers(tmp_path: Path, evaluation: Path, workers: int | None):
    documents, expected = planted()
    plain = write_lines(tmp_path / "a.jsonl", documents)
    packed = tmp_path / "b.jsonl.zst"
    lines = plain.read_bytes().splitlines(keepends=True)
    chunks = [b"".join(lines[n : n + 30]) for n in range(0, len(lines), 30)]
    packed.write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, chunks)))
    settings = everything(sources=[str(plain), str(packed)], part_bytes=20_000, **evaluated(evaluation))

    corpus = run_clean({**settings, "workers": workers}, tmp_path / "out")

    assert corpus.summary["documents"] == len(documents) - len(expected)
    rows = dropped(corpus)
    assert [row["file"] for row in rows].count("b.jsonl.zst") == len(documents)
    assert {row["of"].partition(":")[0] for row in rows if row["step"] == "exact"} == {"a.jsonl"}
    assert [(row["line"], row["byte_offset"]) for row in rows if row["file"] == "a.jsonl"] == [
        (number + 1, sum(map(len, lines[:number]))) for number in sorted(expected)
    ]
    files = {entry.path: entry.sha256 for entry in corpus.manifest.files}
    whole = run_clean({**settings, "workers": 1}, tmp_path / "again")
    assert files == {entry.path: entry.sha256 for entry in whole.manifest.files}
    assert len([name for name in files if name.startswith("train/")]) > 3


def test_records_name_the_line_they_came_from(tmp_path: Path):
    documents = [prose(random.Random(n)) for n in range(40)]
    source = write_lines(tmp_path / "a.jsonl", documents)

    corpus = run_clean({"sources": [str(source)], "exact": True, "part_bytes": 5_000}, tmp_path / "out")

    found = [
        json.loads(line)
        for path in sorted((corpus.path / "train").iterdir())
        for line in zstandard.ZstdDecompressor()
        .stream_reader(path.open("rb"), read_across_frames=True)
        .read()
        .splitlines()
    ]
    assert [(item["meta"]["source"], item["text"]) for item in found] == [
        (f"a.jsonl:{number}", text) for number, text in enumerate(documents, 1)
    ]


def _clean_and_die(settings: dict[str, object], output: Path, number: int, is_after: bool) -> None:
    kill_at(number, is_after=is_after)
    run_clean(settings, output)


@pytest.mark.parametrize("number", [12, 40, 75, 110, 150, 180, 210, 240, 262, 268])
def test_a_killed_run_goes_on_and_gives_the_same(tmp_path: Path, evaluation: Path, number: int):
    source = write_lines(tmp_path / "a.jsonl", planted(count=20)[0])
    settings = everything(sources=[str(source)], part_bytes=10_000, **evaluated(evaluation))
    whole = run_clean(settings, tmp_path / "whole")

    assert run_forked(_clean_and_die, settings, tmp_path / "out", number, bool(number % 2)) == -9
    corpus = run_clean(settings, tmp_path / "out")

    assert corpus.manifest.content == whole.manifest.content
    assert corpus.summary == whole.summary
    assert not (corpus.path / "unfinished").exists()
    assert len(list(whole.path.glob("train/*"))) > 2


def test_a_run_killed_with_workers_goes_on_although_they_may_still_end(tmp_path: Path, evaluation: Path):
    source = write_lines(tmp_path / "a.jsonl", planted(count=800)[0])
    settings = everything(sources=[str(source)], part_bytes=10_000, workers=2, **evaluated(evaluation))
    whole = run_clean(settings, tmp_path / "whole")
    code = "import json, sys, pathlib; from cleaning_corpora import run_clean; "
    code += "run_clean(json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
    for done in ("examined.json", "written.json"):
        words = [sys.executable, "-c", code, json.dumps(settings), str(tmp_path / "out")]
        process = subprocess.Popen(words, env=environment)
        deadline = time.monotonic() + 60
        while process.poll() is None and len(list((tmp_path / "out").glob(f"unfinished/part-*/{done}"))) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.kill()  # alone: its workers notice by themselves
        process.wait()

    corpus = run_clean(settings, tmp_path / "out")

    assert corpus.manifest.content == whole.manifest.content
    assert corpus.summary == whole.summary


def test_the_heldout_part_is_kept_and_is_an_evaluation_set(tmp_path: Path):
    generator = random.Random(3)
    documents = [prose(generator) for _ in range(200)]
    store = ArtifactStore(tmp_path / "store")
    source = write_lines(tmp_path / "a.jsonl", documents)
    whole = CORPUS.run(CorpusConfig(sources=(str(source),), heldout_fraction=0.1), store=store)
    heldout = [record.text for record in kept(whole, "heldout")]
    leaked = write_lines(tmp_path / "b.jsonl", [*documents, f"{prose(generator)}\n{heldout[0]}"])
    gathered = CORPUS.run(CorpusConfig(sources=(str(leaked),), heldout_fraction=0.1), store=store)

    corpus = run_clean({"exact": True, "decontaminate_heldout": True}, tmp_path / "out", inputs={"corpus": gathered})
    careless = run_clean({"exact": True}, tmp_path / "two", inputs={"corpus": gathered})

    assert [record.text for record in kept(corpus, "heldout")] == [record.text for record in kept(gathered, "heldout")]
    assert corpus.summary["heldout_documents"] == gathered.summary["heldout_documents"]
    reasons = {row["reason"] for row in dropped(corpus)}
    assert reasons == {"13-grams of heldout/00000.jsonl.zst"}
    assert len(dropped(corpus)) == 1
    assert not dropped(careless)
    dataset = INGEST.run(
        IngestConfig(tokenizer=str(CASES / "_tokenizers" / "byte257")), inputs={"corpus": corpus}, store=store
    )
    assert dataset.summary["documents"] == corpus.summary["train_documents"]


def test_languages_and_c4_and_masking_change_what_is_written(tmp_path: Path):
    english = "This is a sentence in plain English. Here is another one of them. Write to joe@site.org about it today."
    german = "Dies ist ein Satz in deutscher Sprache. Hier steht noch ein weiterer. Und ein dritter kommt auch dazu."
    source = write_lines(tmp_path / "a.jsonl", [f"Home | About\n{english}", german])
    settings = {"quality": ["c4"], "languages": ["en"], "mask_personal_data": True}

    corpus = run_clean({**settings, "sources": [str(source)]}, tmp_path / "out")

    assert [record.text for record in kept(corpus)] == [english.replace("joe@site.org", "email@example.com")]
    assert [row["reason"] for row in dropped(corpus)] == ["language de"]
    assert (corpus.summary["masked_emails"], corpus.summary["masked_documents"]) == (1, 1)


def test_a_bad_record_stops_the_stage_with_its_true_line(tmp_path: Path):
    source = write_corpus(tmp_path / "a.jsonl", texts(300))
    lines = source.read_bytes().splitlines(keepends=True)
    lines[250] = b'{"text": null}\n'
    source.write_bytes(b"".join(lines))
    settings = {"sources": [str(source)], "exact": True, "part_bytes": 8_000}

    with pytest.raises(RecordError, match=r"a\.jsonl, line 251: 'text' is null"):
        run_clean(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()

    with pytest.raises(InputError, match=r"1 bad records of 330, but clean\.max_rejects .* allows 0\. First: a\.jsonl"):
        run_clean({**settings, "on_error": "quarantine", "max_rejects": 0}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_file_stops_the_stage_or_is_told(tmp_path: Path):
    source = write_corpus(tmp_path / "a.jsonl.gz", texts(300))
    source.write_bytes(source.read_bytes()[:-200])
    settings = {"sources": [str(source)], "exact": True}

    with pytest.raises(DamagedStreamError, match="truncated"):
        run_clean(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()

    corpus = run_clean({**settings, "on_error": "quarantine"}, tmp_path / "out")
    assert corpus.summary["damaged_files"] == 1
    assert corpus.summary["sources"][0]["damaged"]["is_truncated"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"no step is asked for\. Set one or more of clean\.quality, languages"),
        ({"min_characters": 10**6}, r"no document of 1 files is left: 30 filtered \(shorter than 1000000 characters"),
        ({"languages": ["xx"]}, r"clean\.languages: xx is not known\. Known: .*\ben\b"),
        ({"exact": True, "decontaminate_heldout": True}, r"no corpus artifact with a held-out part"),
        ({"decontaminate": ["SOURCE"], "decontaminate_keys": ["quiz"]}, r"has no text under quiz\. Set clean\.decont"),
        ({"decontaminate": ["absent.jsonl"]}, r"clean\.decontaminate: there is no file or folder 'absent\.jsonl'"),
    ],
)
def test_what_cannot_be_cleaned_is_refused_and_leaves_nothing(
    tmp_path: Path, settings: dict[str, object], message: str
):
    source = str(write_lines(tmp_path / "a.jsonl", texts(30)))
    if settings.get("decontaminate") == ["SOURCE"]:
        settings = {**settings, "decontaminate": [source]}

    with pytest.raises((ConfigError, InputError), match=message):
        run_clean({"sources": [source], **settings}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nasty_documents_take_no_longer_than_others(tmp_path: Path, evaluation: Path):
    nasty = ["x" * 2**23, "数据模型" * 2**18, "a b " * 2**19, "!" * 2**20, ".\n" * 2**20, "{" * 2**20, "@" * 2**20]
    nasty += [" ", "\n", "☃", "q@b." * 2**18, "1.1." * 2**18, "2001:" * 2**18]
    source = write_lines(tmp_path / "a.jsonl", nasty)
    settings = everything(sources=[str(source)], **evaluated(evaluation), min_characters=0, quality=[])
    started = time.process_time()

    corpus = run_clean(settings, tmp_path / "out")

    assert corpus.summary["documents"] == len(nasty)
    assert time.process_time() - started < 20


def test_the_command_cleans_a_corpus_and_says_what_became_of_it(
    tmp_path: Path, evaluation: Path, capsys: pytest.CaptureFixture[str]
):
    documents, expected = planted()
    source = write_lines(tmp_path / "a.jsonl", documents)
    words = ["clean", "--source", source, "--quality", "gopher", "--exact", "--minhash", 0.75, "--min-characters", 30]
    words += ["--decontaminate", evaluation, "-s", "decontaminate_keys=[question]", "--mask-personal-data"]
    words += ["--store", tmp_path / "store", "--output", tmp_path / "out"]

    found = shardline(capsys, *words, "--json")
    again = shardline(capsys, *words)

    assert (found.code, again.code) == (0, 0)
    assert found.data["filtered"] == len(expected)
    assert found.data["dropped"]["exact"] == {"exact duplicate": 6}
    assert "done already" in again.out
    assert f"left out: {tmp_path / 'out' / 'dropped.parquet'}" in again.out
    refused = shardline(capsys, "clean", "--source", source, "--output", tmp_path / "none")
    assert (refused.code, "no step is asked for" in refused.err) == (2, True)


def test_a_pipeline_trains_its_tokenizer_on_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    generator = random.Random(4)
    documents = [prose(generator) for _ in range(60)]
    write_lines(tmp_path / "a.jsonl", documents + [text.replace(".", "!") for text in documents[:10]])
    (tmp_path / "pipeline.yaml").write_text(
        "corpus: {sources: [a.jsonl], heldout_fraction: 0.1}\nclean: {minhash: {}, exact: true}\n"
        "tokenizer: {vocab_size: 300}\ningest: {}\ntracking: {is_on: false}\n"
    )

    ran = shardline(capsys, "run", tmp_path / "pipeline.yaml")
    planned = shardline(capsys, "plan", tmp_path / "pipeline.yaml", "--json")

    assert (ran.code, planned.code) == (0, 0), ran.err
    dataset = read_artifact(next((tmp_path / "store" / "dataset").glob(f"chain-{'?' * 12}")))
    assert dataset.manifest.inputs["corpus"].path.startswith("corpus/chain-clean-")


def test_one_long_stream_is_fed_to_several_workers(tmp_path: Path):
    documents, expected = planted()
    plain = write_lines(tmp_path / "a.jsonl", documents)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    settings = everything(sources=[str(packed)])

    alone, two = (run_clean({**settings, "workers": n}, tmp_path / str(n)) for n in (None, 2))

    assert alone.manifest.content == two.manifest.content
    assert len(dropped(two)) == sum(step != "decontamination" for step in expected.values())


def test_rows_of_parquet_are_cleaned_as_lines_are(tmp_path: Path):
    documents, expected = planted()
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": documents}), path, row_group_size=20)
    settings = everything(sources=[str(path)], part_bytes=4_000, workers=2)

    corpus = run_clean(settings, tmp_path / "out")

    found = {row["line"] - 1: row["step"] for row in dropped(corpus)}
    assert found == {number: step for number, step in expected.items() if step != "decontamination"}
    assert len(list((corpus.path / "train").iterdir())) > 1


@pytest.mark.parametrize(("ngram", "max_share", "is_left_out"), [(13, 0, True), (13, 0.5, False), (8, 0.05, True)])
def test_a_share_of_ngrams_can_be_allowed(
    tmp_path: Path, evaluation: Path, ngram: int, max_share: float, is_left_out: bool
):
    good = prose(random.Random(2))
    source = write_lines(tmp_path / "a.jsonl", [f"{good}\n{PASSAGE}", good])
    settings = {"sources": [str(source)], **evaluated(evaluation), "ngram": ngram, "max_share": max_share}

    corpus = run_clean(settings, tmp_path / "out")

    assert [row["reason"] for row in dropped(corpus)] == [f"{ngram}-grams of questions.jsonl"] * is_left_out


def test_a_source_in_memory_is_cleaned(tmp_path: Path):
    file_system = fsspec.filesystem("memory")
    file_system.pipe("/clean/a.jsonl", write_lines(tmp_path / "a.jsonl", [prose(random.Random(1))] * 2).read_bytes())

    corpus = run_clean({"sources": ["memory://clean/a.jsonl"], "exact": True, "workers": 2}, tmp_path / "out")

    assert (corpus.summary["documents"], corpus.summary["filtered"]) == (1, 1)
