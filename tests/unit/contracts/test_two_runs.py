"""Two runs on one --output folder: waiting helps only if both build the same."""

from pathlib import Path

import pytest
from small_artifacts import recipe_of, write

from contracts.errors import ConfigError, LockedError
from contracts.store import ArtifactStore, Workspace


def test_another_run_with_other_settings_is_refused_at_once(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store", output=tmp_path / "out")
    refused: list[LockedError] = []

    def work(workspace: Workspace) -> dict[str, int]:
        with pytest.raises(LockedError, match="with other settings or inputs") as error:
            store.make("dataset", "b", recipe_of(lr=2.5), write({"x": "2"}))
        refused.append(error.value)
        return {}

    store.make("dataset", "a", recipe_of(lr=1.5), work)

    assert refused[0].exit_code == 4


def test_an_unfinished_build_says_which_settings_differ(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store", output=tmp_path / "out")

    def work(workspace: Workspace) -> dict[str, int]:
        (workspace.path / "half").write_text("a part")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.make("dataset", "a", recipe_of(lr=1.5), work)

    with pytest.raises(ConfigError, match=r"other settings or inputs \(config.lr: 1.5 -> 2.5\)"):
        store.make("dataset", "b", recipe_of(lr=2.5), write({"x": "2"}))
