"""Corpora with planted documents that a step of cleaning must find, and nothing else."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from contracts.artifact import Artifact
from contracts.store import ArtifactStore
from preprocessing.cleaning.clean import CLEAN
from preprocessing.cleaning.config import CleanConfig
from preprocessing.reading.pieces import read_records
from preprocessing.reading.records import Record, RecordFormat
from preprocessing.reading.sources import corpus_files

STOP = ["the", "of", "and", "that", "with", "to"]
WORDS = [
    f"{a}{b}{c}" for a in ("ba", "de", "ki", "lo", "mu") for b in ("ran", "tel", "sor", "vim") for c in ("", "a", "es")
]
PASSAGE = "how many rivers run through the seven old towns of that valley and where do they meet the sea at last"


def prose(generator: random.Random, count: int = 90) -> str:
    """Sentences of made-up words and stop words, which pass Gopher's rules."""
    words = [
        generator.choice(STOP if n % 4 == 0 else WORDS) + str(generator.randint(0, 30)) * (n % 9 == 5)
        for n in range(count)
    ]
    lines = [" ".join(words[n : n + 9]).capitalize() + "." for n in range(0, count, 9)]
    return "\n".join(lines)


def planted(seed: int = 1, count: int = 120) -> tuple[list[str], dict[int, str]]:
    """Return documents, and the step that must leave each planted one out, by its number."""
    generator = random.Random(seed)
    documents = [prose(generator) for _ in range(count)]
    expected: dict[int, str] = {}

    def plant(step: str, text: str) -> None:
        expected[len(documents)] = step
        documents.append(text)
        documents.append(prose(generator))  # good ones between

    for number in range(6):
        plant("exact", documents[7 * number])
        words = documents[7 * number + 1].split(" ")
        words[len(words) // 2] = "other"
        plant("near", " ".join(words))
        plant("near", documents[7 * number + 2].upper() + "!")
        good = prose(generator).split("\n")
        plant("decontamination", "\n".join([*good[:4], PASSAGE.upper() + "?", *good[4:]]))
        plant("quality", "\n".join([f"- item {number}"] * 60))
        plant("quality", " ".join(f"{generator.random():.9f}" for _ in range(70)))
        plant("length", f"too short {number}")
    return documents, expected


def write_lines(path: Path, documents: Sequence[str], *, subsets: Sequence[str] = ("One", "Two")) -> Path:
    """Write a JSONL file."""
    records = [
        {"text": text, "meta": {"pile_set_name": subsets[number % len(subsets)]}}
        for number, text in enumerate(documents)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def everything(**others: Any) -> dict[str, Any]:
    """Settings with every step that needs no file."""
    steps: dict[str, Any] = {"min_characters": 30, "quality": ("gopher",), "exact": True, "minhash": {}}
    return {**steps, "mask_personal_data": True, **others}


def run_clean(settings: Mapping[str, Any], output: Path, *, inputs: Mapping[str, Artifact] | None = None) -> Artifact:
    """Clean into a folder."""
    store = ArtifactStore(output.parent / "store", output=output)
    return CLEAN.run(CleanConfig.model_validate(dict(settings)), inputs=inputs, store=store)


def dropped(artifact: Artifact) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(artifact.path / "dropped.parquet").to_pylist()
    return rows


def kept(artifact: Artifact, part: str = "train") -> list[Record]:
    return list(read_records(corpus_files(artifact, part), RecordFormat()))
