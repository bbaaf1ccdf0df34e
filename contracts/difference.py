"""What differs, field by field: between a recipe and the nearest build, and between two artifacts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.artifact import Artifact
from contracts.configuration import Settings
from contracts.fingerprint import Recipe
from contracts.stage import Stage
from contracts.store import ArtifactStore

NOT_SET = "(not set)"


@dataclass(frozen=True)
class Change:
    """One field with two values, as it is called in a recipe: "config.optimizer.lr"."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: {_short(self.old)} -> {_short(self.new)}"


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


def changes(old: Any, new: Any) -> tuple[Change, ...]:
    """List the leaves of two nested values that differ; names are joined by dots."""
    before, after = flatten(old), flatten(new)
    names = sorted({*before, *after})
    pairs = [(name, before.get(name, NOT_SET), after.get(name, NOT_SET)) for name in names]
    return tuple(Change(name, old_value, new_value) for name, old_value, new_value in pairs if old_value != new_value)


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


def flatten(value: Any, prefix: str = "", *, separator: str = ".") -> dict[str, Any]:
    """Flatten nested mappings and lists into one level of joined names; empty ones stay as they are."""
    if isinstance(value, Mapping) and value:
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        items = [(str(n), item) for n, item in enumerate(value)]
    else:
        return {prefix: list(value) if isinstance(value, tuple) else value}
    result: dict[str, Any] = {}
    for key, item in items:
        result.update(flatten(item, f"{prefix}{separator}{key}" if prefix else key, separator=separator))
    return result


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
