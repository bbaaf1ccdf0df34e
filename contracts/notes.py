"""Markdown notes in MLflow: what an artifact was made of and what was made of it, with links."""

from collections.abc import Callable

from contracts.artifact import MODEL_KINDS, Artifact
from contracts.lineage import Relative, ancestors, describe
from contracts.store import ArtifactStore
from contracts.tracking import INPUTS, PATH, STAGE, RunView, Tracker

NOTE = "mlflow.note.content"
_MAX_USERS = 50


def write_notes(tracker: Tracker, store: ArtifactStore, artifact: Artifact, relatives: list[Relative]) -> None:
    """Write the Markdown notes of a run, of its model, and of the runs directly above it."""
    runs: dict[str, RunView | None] = {}

    def run_of(fingerprint: str) -> RunView | None:
        if fingerprint not in runs:
            runs[fingerprint] = tracker.find_run(fingerprint)
        return runs[fingerprint]

    _write_note(tracker, artifact, relatives, run_of)
    for relative in relatives:
        if relative.depth == 1 and isinstance(relative.item, Artifact):
            _write_note(tracker, relative.item, ancestors(store, relative.item), run_of)


def _write_note(
    tracker: Tracker, artifact: Artifact, relatives: list[Relative], run_of: Callable[[str], RunView | None]
) -> None:
    run = tracker.find_run(artifact.fingerprint, artifact.manifest.content)
    if run is None:
        return
    link = f"#/experiments/{tracker.experiment_id}"
    lines = [f"**{artifact.manifest.recipe.stage}** made `{artifact.kind}/{artifact.name}`", ""]
    lines += [f"`{artifact.path}`", ""]
    model_id = None
    if artifact.kind in MODEL_KINDS:
        model_id = tracker.find_model(artifact.fingerprint, artifact.manifest.content)
        model = f" · [model]({link}/models/{model_id})" if model_id else ""
        lines += [f"[run]({link}/runs/{run.run_id}){model}", ""]
    lines += ["Made of:", ""] if relatives else []
    for relative in relatives:
        found = run_of(relative.item.fingerprint)
        name = describe(relative.item).split("  [")[0]
        text = f"[{name}]({link}/runs/{found.run_id})" if found else name
        lines.append(f"{'  ' * (relative.depth - 1)}- {relative.name}: {text}")
    users = sorted(tracker.runs(f"tags.`{INPUTS}` LIKE '%{artifact.fingerprint}%'"), key=lambda r: r.fingerprint)
    lines += ["", "Used by:", ""] if users else []
    for user in users[:_MAX_USERS]:
        name = f"{user.tags.get(STAGE, '')} {user.tags.get(PATH, '')}"
        lines.append(f"- [{name}]({link}/runs/{user.run_id})")
    if len(users) > _MAX_USERS:
        lines.append(f"- and {len(users) - _MAX_USERS} more: filter runs by the tag {INPUTS}")
    note = "\n".join(lines)
    if run.tags.get(NOTE) != note:
        tracker.set_tags(run.run_id, {NOTE: note})
        if model_id:
            tracker.set_model_tags(model_id, {NOTE: note})
