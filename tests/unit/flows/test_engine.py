"""The engine over stages that only write a text file: what runs, what is skipped, and why."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from contracts.artifact import Artifact
from contracts.configuration import Settings
from contracts.errors import ConfigError, InputError
from contracts.progress import SilentProgress
from contracts.stage import Stage
from contracts.store import ArtifactStore, Workspace
from flows.engine import Build, Planned, Step, plan, run


class TextSettings(Settings):
    text: str = "a"
    fails: bool = False


def _write(settings: TextSettings, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    if settings.fails:
        raise InputError("the stage failed")
    before = "".join((item.path / "text").read_text() for item in inputs.values())
    (workspace.path / "text").write_text(before + settings.text)
    return {"letters": len(before) + 1}


WRITE = Stage("write", 1, "dataset", TextSettings, _write)


def chain(*texts: str) -> list[Step]:
    names = [f"s{n}" for n in range(len(texts))]
    return [
        Step(name, WRITE, TextSettings(text=text), {"before": names[n - 1]} if n else {}, label=name)
        for n, (name, text) in enumerate(zip(names, texts, strict=True))
    ]


def built(steps: list[Step], store: ArtifactStore, **options: Any) -> list[str]:
    names: list[str] = []

    def conduct(planned: Planned, build: Build) -> Artifact:
        if planned.action != "skip":
            names.append(planned.step.name)
        return build(SilentProgress())

    run(steps, store, conduct=conduct, **options)
    return names


def actions(steps: list[Step], store: ArtifactStore) -> dict[str, str]:
    return {item.step.name: item.action for item in plan(steps, store)}


def test_a_second_run_builds_nothing(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)

    assert built(chain("a", "b", "c"), store) == ["s0", "s1", "s2"]
    assert built(chain("a", "b", "c"), store) == []
    assert set(actions(chain("a", "b", "c"), store).values()) == {"skip"}


def test_a_changed_setting_runs_its_stage_and_what_depends_on_it(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    built(chain("a", "b", "c"), store)

    assert actions(chain("a", "x", "c"), store) == {"s0": "skip", "s1": "run", "s2": "run"}
    assert built(chain("a", "x", "c"), store) == ["s1", "s2"]


def test_a_damaged_file_is_built_again_but_not_what_depends_on_it_when_its_content_is_the_same(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    built(chain("a", "b"), store)
    next(tmp_path.glob("dataset/s0-*/text")).write_text("longer than before")

    assert built(chain("a", "b"), store) == ["s0"]


def test_a_forced_stage_is_built_anew(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    built(chain("a", "b"), store)

    assert built(chain("a", "b"), store, force=["s0"]) == ["s0"]


def test_only_one_stage_runs_when_asked_and_the_next_goes_on_from_it(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)

    assert built(chain("a", "b", "c"), store, only=["s0"]) == ["s0"]
    assert built(chain("a", "b", "c"), store, start="s1") == ["s1", "s2"]


def test_a_stage_without_its_inputs_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="s1 needs s0, not built yet"):
        built(chain("a", "b"), ArtifactStore(tmp_path), only=["s1"])


def test_an_unknown_stage_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'s9' is no stage of this pipeline. Stages: s0, s1"):
        built(chain("a", "b"), ArtifactStore(tmp_path), force=["s9"])


def test_a_failed_stage_publishes_nothing_and_stops_the_chain(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    steps = [Step("s0", WRITE, TextSettings(fails=True)), Step("s1", WRITE, TextSettings(), {"before": "s0"})]

    with pytest.raises(InputError, match="the stage failed"):
        built(steps, store)
    assert list(store.artifacts()) == []


def test_the_plan_of_a_chain_needs_nothing_built(tmp_path: Path) -> None:
    planned = plan(chain("a", "b", "c"), ArtifactStore(tmp_path))

    assert [item.action for item in planned] == ["run", "run", "run"]
    assert not tmp_path.joinpath("dataset").exists()
