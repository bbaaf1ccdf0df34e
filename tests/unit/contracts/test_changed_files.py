"""A raw file that changes during the work: copies of it are given up, work worth more than that is kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_artifacts import SAMPLE, SampleSettings

from contracts.errors import InputError
from contracts.stage import Stage
from contracts.store import ArtifactStore, Workspace


def stage_over(source: Path, **more: Any) -> Stage[SampleSettings]:
    def work(settings: SampleSettings, inputs: Any, workspace: Workspace) -> dict[str, Any]:
        (workspace.path / "data.bin").write_text("made of the old file")
        source.write_text("another")
        return {}

    return replace(SAMPLE, work=work, raw_files=lambda _: {"source": source}, **more)


def test_a_copy_of_a_file_that_changed_is_given_up(tmp_path: Path):
    (tmp_path / "a").write_text("one")
    store = ArtifactStore(tmp_path / "store", output=tmp_path / "out")
    with pytest.raises(InputError, match="a changed while it was read"):
        stage_over(tmp_path / "a", refuses_changes=True).run(SampleSettings(), store=store)
    assert not (tmp_path / "out").exists()


def test_other_work_outlives_a_change_of_its_files(tmp_path: Path):
    (tmp_path / "a").write_text("one")
    store = ArtifactStore(tmp_path / "store", output=tmp_path / "out")
    made = stage_over(tmp_path / "a").run(SampleSettings(), store=store)
    assert (made.path / "data.bin").is_file()
