"""A stage: one link of the chain, usable alone, made of settings, inputs and a function.

A stage module declares one `Stage`; the command line and the Prefect tasks call its `run`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from contracts.artifact import Artifact
from contracts.configuration import Settings, identity
from contracts.errors import InputError
from contracts.fingerprint import Recipe
from contracts.progress import Progress, SilentProgress
from contracts.store import ArtifactStore, Summary, Workspace

C = TypeVar("C", bound=Settings)


def _no_files(settings: Any) -> Mapping[str, Path]:
    return {}


def _no_digests(settings: Any) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Stage(Generic[C]):
    """One link of the chain.

    Args:
        name: As users write it: "ingest".
        version: Bumped by hand when the code changes the result for the same settings.
        kind: Kind of the artifact it makes.
        settings: Type of its settings.
        work: Fills `workspace.path` and returns the summary. An exception publishes nothing.
        raw_files: Files outside the store that the settings name: name (identity) to path.
        raw: Digests of other raw inputs that are no single files, where there are any.
        refuses_changes: What it makes is a copy of its raw files, so that one which changes meanwhile gives a
            mixture, of which nothing is kept. Not for stages whose unfinished work is worth more than that.
    """

    name: str
    version: int
    kind: str
    settings: type[C]
    work: Callable[[C, Mapping[str, Artifact], Workspace], Summary]
    raw_files: Callable[[C], Mapping[str, Path]] = _no_files
    raw: Callable[[C], Mapping[str, str]] = _no_digests
    refuses_changes: bool = False

    def recipe(self, settings: C, *, inputs: Mapping[str, str], store: ArtifactStore) -> Recipe:
        """Return what decides the result; `inputs` are fingerprints, so nothing upstream need exist."""
        return self._recipe(settings, self.raw_files(settings), inputs, store)

    def _recipe(
        self, settings: C, files: Mapping[str, Path], inputs: Mapping[str, str], store: ArtifactStore
    ) -> Recipe:
        digests = store.digest_all(files)
        return Recipe(self.name, self.version, identity(settings), dict(inputs), {**digests, **self.raw(settings)})

    def run(
        self,
        settings: C,
        *,
        inputs: Mapping[str, Artifact] | None = None,
        store: ArtifactStore,
        progress: Progress | None = None,
        label: str = "",
        force: bool = False,
    ) -> Artifact:
        """Return the artifact, building it unless it is complete.

        Args:
            inputs: The input artifacts by the names that the stage knows them by.
            label: First part of the folder's name; no part of the identity.
            force: Build it from scratch even if it is complete.

        Raises:
            ShardlineError: The settings, the inputs or the data are wrong; see `contracts.errors`.
        """
        inputs = dict(inputs or {})
        files = dict(self.raw_files(settings))
        recipe = self._recipe(settings, files, {name: item.fingerprint for name, item in inputs.items()}, store)

        def work(workspace: Workspace) -> Summary:
            summary = self.work(settings, inputs, workspace)
            if self.refuses_changes:
                _refuse_changed(files, recipe, workspace)
            return summary

        return store.make(
            self.kind,
            label or self.name,
            recipe,
            work,
            config=settings.model_dump(mode="json"),
            inputs=inputs,
            progress=progress or SilentProgress(),
            force=force,
        )


def _refuse_changed(files: Mapping[str, Path], recipe: Recipe, workspace: Workspace) -> None:
    """Make sure that raw files are still what the recipe says: one may have been replaced while it was read.

    A file that is gone by now was whole when it was read: readers notice one that ends early.

    Raises:
        InputError: One is not; nothing of the work is kept, since it may be of either.
    """
    there = {name: path for name, path in files.items() if path.is_file()}
    try:
        found = workspace.store.digest_all(there)
        changed = next((there[name] for name, value in found.items() if recipe.raw.get(name) != value), None)
    except InputError:  # it is being written right now
        changed = Path("an input file")
    if changed is not None:
        workspace.discard()
        raise InputError(f"{changed} changed while it was read. Wait until its writer is done, then start again.")
