"""Runs the ingest stage on the case folders of `tests/cases`, as a user would."""

import hashlib
import json
from pathlib import Path
from typing import Any

from contracts.artifact import Artifact
from contracts.store import ArtifactStore
from preprocessing.config import IngestConfig
from preprocessing.ingestion.ingest import INGEST

CASES = Path(__file__).parent.parent / "cases"


def case_path(case: str, *names: str) -> list[str]:
    """Paths of files of a case."""
    return [str(CASES / case / name) for name in names]


def expected(case: str) -> dict[str, Any]:
    """The machine-readable expectations of a case."""
    data: dict[str, Any] = json.loads((CASES / case / "expected.json").read_text(encoding="utf-8"))
    return data


def ingest_files(sources: list[str], output: Path, *, tokenizer: str = "byte257", **settings: Any) -> Artifact:
    """Ingest files with one of the tokenizers of the cases into `output`."""
    config = IngestConfig(sources=tuple(sources), tokenizer=str(CASES / "_tokenizers" / tokenizer), **settings)
    return INGEST.run(config, store=ArtifactStore(output.parent / "store", output=output))


def outcome(artifact: Artifact) -> dict[str, Any]:
    """Documents, tokens and digests of a dataset of one shard, under the names of the case files."""
    names = sorted(path.name for path in artifact.path.glob("data-*"))
    assert names == ["data-00000.bin", "data-00000.idx"]
    pair = {suffix: (artifact.path / f"data-00000.{suffix}").read_bytes() for suffix in ("bin", "idx")}
    return {
        "documents": artifact.summary["documents"],
        "tokens": artifact.summary["tokens"],
        "bin_bytes": len(pair["bin"]),
        **{f"{suffix}_sha256": hashlib.sha256(data).hexdigest() for suffix, data in pair.items()},
    }


def values(expectation: dict[str, Any]) -> dict[str, Any]:
    """The part of an expectation that `outcome` gives."""
    keys = ("documents", "tokens", "bin_bytes", "bin_sha256", "idx_sha256")
    return {key: expectation[key] for key in keys if key in expectation}


def assert_outcome(artifact: Artifact, expectation: dict[str, Any]) -> None:
    """The dataset has exactly the bytes that the case asks for, and its lines add up."""
    wanted = values(expectation)
    assert wanted
    found = outcome(artifact)
    assert {key: found[key] for key in wanted} == wanted
    summary = artifact.summary
    parts = ("documents", "empty", "filtered", "rejected")
    assert summary["lines"] == sum(summary[name] for name in parts)
    for file in summary["sources"]:
        assert file["lines"] == sum(file[name] for name in parts)
