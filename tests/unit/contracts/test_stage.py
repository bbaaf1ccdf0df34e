import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_artifacts import SAMPLE, SampleSettings

from contracts.artifact import Artifact
from contracts.configuration import Settings
from contracts.errors import ConfigError
from contracts.stage import Stage
from contracts.store import ArtifactStore, Workspace


class ReadSettings(Settings):
    source: Path


def read(settings: ReadSettings, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    (workspace.path / "copy.txt").write_text(settings.source.read_text())
    return {"characters": len(settings.source.read_text())}


READER = Stage(
    name="read",
    version=1,
    kind="corpus",
    settings=ReadSettings,
    work=read,
    raw_files=lambda settings: {"source": settings.source},
)


def source(path: Path, text: str) -> ReadSettings:
    path.write_text(text)
    os.utime(path, (1_000_000, 1_000_000))
    return ReadSettings(source=path)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def test_a_stage_runs_once_for_settings_that_mean_the_same(store: ArtifactStore):
    first = SAMPLE.run(SampleSettings(num_workers=1), store=store)

    assert SAMPLE.run(SampleSettings(num_workers=8), store=store) == first
    assert first.manifest.config["num_workers"] == 1


def test_another_version_of_a_stage_is_another_artifact(store: ArtifactStore):
    newer = Stage(name="sample", version=2, kind="dataset", settings=SampleSettings, work=SAMPLE.work)

    assert SAMPLE.run(SampleSettings(), store=store).path != newer.run(SampleSettings(), store=store).path


def test_the_content_of_a_raw_file_is_identity(store: ArtifactStore, tmp_path: Path):
    first = READER.run(source(tmp_path / "a.txt", "one"), store=store)

    second = READER.run(source(tmp_path / "a.txt", "other"), store=store)

    assert first.fingerprint != second.fingerprint


def test_a_raw_file_that_is_missing_is_told_before_any_work(store: ArtifactStore, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"gone\.txt: cannot be read"):
        READER.run(ReadSettings(source=tmp_path / "gone.txt"), store=store)

    assert not store.root.exists()


def test_force_builds_again(store: ArtifactStore):
    first = SAMPLE.run(SampleSettings(), store=store)

    again = SAMPLE.run(SampleSettings(), store=store, force=True)

    assert again.fingerprint == first.fingerprint
    assert again.manifest.provenance["finished"] > first.manifest.provenance["finished"]
