"""Runs a chain of steps over a store: what is done is skipped, what is left is run in order.

Both the command line and the Prefect flows call these functions; neither Prefect nor MLflow is
imported here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from contracts.artifact import Artifact
from contracts.configuration import Settings
from contracts.errors import ConfigError
from contracts.fingerprint import Recipe
from contracts.progress import Progress
from contracts.stage import Stage
from contracts.store import ArtifactStore, State

Action = Literal["skip", "run", "resume", "wait"]
_ACTIONS: Mapping[State, Action] = {
    "done": "skip",
    "absent": "run",
    "partial": "resume",
    "running": "wait",
    "stale": "run",
    "corrupt": "run",
}


@dataclass(frozen=True)
class Step:
    """One stage at its place in a chain.

    Args:
        name: Unique in the chain: "pretrain", "reshape.hf".
        inputs: Name of each input to the step that makes it.
        label: First part of the artifact's folder name.
        given: Inputs that no step of the chain makes.
    """

    name: str
    stage: Stage[Any]
    settings: Settings
    inputs: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    given: Mapping[str, Artifact] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """A step, what it would make, how far that is, and what will be done about it."""

    step: Step
    recipe: Recipe
    state: State
    action: Action
    reason: str
    artifact: Artifact | None
    is_forced: bool = False


def plan(steps: Sequence[Step], store: ArtifactStore, *, force: Iterable[str] = ()) -> list[Planned]:
    """Say for each step whether it is done, and if not, why it would run. Builds nothing.

    Raises:
        ConfigError: A forced name is no step, or a raw input is missing.
    """
    forced = set(chosen(steps, force))
    planned: dict[str, Planned] = {}
    for step in steps:
        fingerprints = {name: item.fingerprint for name, item in step.given.items()}
        fingerprints |= {name: planned[source].recipe.fingerprint for name, source in step.inputs.items()}
        recipe = step.stage.recipe(step.settings, inputs=fingerprints, store=store)
        ready = {name: planned[source].artifact for name, source in step.inputs.items()}
        found = {name: item for name, item in ready.items() if item is not None} | dict(step.given)
        state = store.state(step.stage.kind, step.label, recipe, found)
        artifact = store.get(step.stage.kind, step.label, recipe) if state == "done" else None
        action = _ACTIONS[state]
        reason = _reason(state)
        upstream = [source for source in step.inputs.values() if planned[source].action != "skip"]
        is_forced = step.name in forced
        if is_forced:
            action, reason, artifact = "run", "forced", None
        elif action == "skip" and upstream:
            reason = f"done; runs again only if {', '.join(upstream)} gives other content"
        planned[step.name] = Planned(step, recipe, state, action, reason, artifact, is_forced)
    return list(planned.values())


def _reason(state: State) -> str:
    return {
        "done": "done",
        "absent": "not built yet with these settings and inputs",
        "partial": "an unfinished build of the same recipe goes on",
        "running": "another process builds it now",
        "stale": "an input was rebuilt with other content",
        "corrupt": "files are missing or have another size",
    }[state]


Build = Callable[[Progress], Artifact]
Conduct = Callable[[Planned, Build], Artifact]


def run(
    steps: Sequence[Step],
    store: ArtifactStore,
    *,
    conduct: Conduct,
    force: Iterable[str] = (),
    only: Iterable[str] = (),
    start: str | None = None,
) -> dict[str, Artifact]:
    """Run every step that is not done, in order; return the artifact of each step.

    Args:
        conduct: Is given each step with the function that builds it (and at once returns what is
            done), calls it, and returns the artifact: the place for progress, tracking, a Prefect task.
        force: Names of steps to build anew although they are done.
        only: Names of the steps to run; the inputs of others must be done.
        start: First step to run; those before it must be done.

    Raises:
        ConfigError: A named step does not exist, or an input of a chosen step is not built.
        ShardlineError: From a stage.
    """
    names = [step.name for step in steps]
    wanted = set(chosen(steps, only) if only else names)
    if start is not None:
        wanted -= set(names[: names.index(chosen(steps, [start])[0])])
    forced = set(chosen(steps, force)) & wanted
    done: dict[str, Artifact] = {}
    for step in steps:
        missing = [source for source in step.inputs.values() if source not in done]
        if missing and step.name in wanted:
            raise ConfigError(f"{step.name} needs {', '.join(missing)}, not built yet. Run without --only or --from.")
        if missing:
            continue
        inputs = dict(step.given) | {name: done[source] for name, source in step.inputs.items()}
        planned = _as_it_stands(step, inputs, store)
        if step.name in forced:
            planned = replace(planned, action="run", reason="forced", artifact=None, is_forced=True)
        if planned.artifact is not None or step.name in wanted:
            done[step.name] = conduct(planned, _builder(planned, inputs, store))
    return done


def _as_it_stands(step: Step, inputs: Mapping[str, Artifact], store: ArtifactStore) -> Planned:
    fingerprints = {name: item.fingerprint for name, item in inputs.items()}
    recipe = step.stage.recipe(step.settings, inputs=fingerprints, store=store)
    state = store.state(step.stage.kind, step.label, recipe, inputs)
    artifact = store.get(step.stage.kind, step.label, recipe) if state == "done" else None
    return Planned(step, recipe, state, _ACTIONS[state], _reason(state), artifact)


def _builder(planned: Planned, inputs: Mapping[str, Artifact], store: ArtifactStore) -> Build:
    step = planned.step

    def build(progress: Progress) -> Artifact:
        if planned.artifact is not None:
            return planned.artifact
        return step.stage.run(
            step.settings, inputs=inputs, store=store, progress=progress, label=step.label, force=planned.is_forced
        )

    return build


def chosen(steps: Sequence[Step], names: Iterable[str]) -> list[str]:
    """Resolve step names; the name of a group ("reshape") stands for all its members.

    Raises:
        ConfigError: A name fits no step.
    """
    result = []
    for name in names:
        fits = [step.name for step in steps if step.name == name or step.name.startswith(f"{name}.")]
        if not fits:
            raise ConfigError(f"{name!r} is no stage of this pipeline. Stages: {', '.join(s.name for s in steps)}.")
        result += fits
    return result
