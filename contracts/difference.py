"""What differs, field by field: between a recipe and the nearest build, and between two artifacts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.artifact import Artifact
from contracts.changes import NOT_SET, Change, changes
from contracts.configuration import Settings
from contracts.fingerprint import Recipe
from contracts.stage import Stage
from contracts.store import ArtifactStore


@dataclass(frozen=True)
class Explanation:
    """Why a stage would run: the nearest build of it, and what differs; no changes: it is built.

    Args:
        nearest: The build of the stage with the fewest differences, the newest of several; None
            if the stage was never built in this store.
    """

    nearest: Artifact | None
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        if self.nearest is None:
            return "never built in this store"
        if not self.changes:
            return f"built as {self.nearest.kind}/{self.nearest.name}"
        lines = [f"differs from {self.nearest.kind}/{self.nearest.name}:", *map(str, self.changes)]
        return "\n  ".join(lines)


def explain(
    store: ArtifactStore, stage: Stage[Any], settings: Settings, *, inputs: Mapping[str, str] | None = None
) -> Explanation:
    """Say how a stage with these settings differs from the nearest build of it in the store.

    Args:
        inputs: Fingerprints of its inputs, by name.
    """
    return explain_recipe(store, stage.kind, stage.recipe(settings, inputs=inputs or {}, store=store))


def explain_recipe(store: ArtifactStore, kind: str, recipe: Recipe) -> Explanation:
    """Say how a recipe differs from the nearest build of its stage in the store."""
    best: tuple[int, float] | None = None
    result = Explanation(None, ())
    for artifact in store.artifacts():
        if artifact.kind != kind or artifact.manifest.recipe.stage != recipe.stage:
            continue
        changes = recipe_changes(artifact.manifest.recipe, recipe)
        rank = (len(changes), -float(artifact.manifest.provenance.get("finished", 0)))
        if best is None or rank < best:
            best, result = rank, Explanation(artifact, changes)
    return result


def recipe_changes(old: Recipe, new: Recipe) -> tuple[Change, ...]:
    """List the fields of two recipes that differ, in alphabetical order."""
    return changes(old.as_dict(), new.as_dict())


def artifact_changes(old: Artifact, new: Artifact) -> dict[str, tuple[Change, ...]]:
    """Compare two artifacts: recipe, settings that are no identity, summary numbers, and files by digest."""
    files = [{entry.path: entry.sha256[:12] for entry in item.manifest.files} for item in (old, new)]
    names = sorted({*files[0], *files[1]})
    pairs = [(name, files[0].get(name, NOT_SET), files[1].get(name, NOT_SET)) for name in names]
    recipe = recipe_changes(old.manifest.recipe, new.manifest.recipe)
    known = {change.field for change in recipe}
    return {
        "recipe": recipe,
        "execution": tuple(
            change
            for change in changes({"config": old.manifest.config}, {"config": new.manifest.config})
            if change.field not in known
        ),
        "summary": changes(old.manifest.summary, new.manifest.summary),
        "files": tuple(Change(name, a, b) for name, a, b in pairs if a != b),
    }
