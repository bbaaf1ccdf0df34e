"""Prefect flows: one for the chain and one per stage, thin over the functions of `flows.engine`.

The artifact store is the only cache: a stage that is done ends in a completed state named
Skipped. Only deployments and tests import this module; the plain command line never does.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, State

from contracts.artifact import Artifact
from contracts.configuration import Settings
from contracts.errors import ConfigError
from contracts.store import ArtifactStore
from conversion.config import ReshapeConfig
from evaluation.config import EvaluateConfig, ReportConfig
from flows.engine import Build, Planned, Step, plan, run
from flows.pipeline import PipelineConfig, steps_of
from flows.recording import Recorder
from flows.references import resolve_inputs
from flows.stages import stage_named
from preprocessing.cleaning.config import CleanConfig
from preprocessing.config import CorpusConfig, IndexConfig, IngestConfig, TokenizerConfig
from training.config import PretrainConfig

PROGRESS_EVERY_S = 5.0
LOG_EVERY_S = 15.0


class PrefectProgress:
    """Shows the progress of a stage as a Prefect progress artifact and, rarely, as a log line."""

    def __init__(self, name: str, logger: "logging.Logger | logging.LoggerAdapter[Any]") -> None:
        self._name = name
        self._logger = logger
        self._artifact: Any = None
        self._shown = self._logged = 0.0

    def update(self, done: float, *, total: float | None, unit: str, **numbers: float | str) -> None:
        now = time.monotonic()
        if now - self._logged >= LOG_EVERY_S:
            self._logged = now
            self._logger.info("%s: %s of %s %s %s", self._name, done, total, unit, dict(numbers))
        if total and now - self._shown >= PROGRESS_EVERY_S:
            self._shown = now
            percent = min(100.0, 100.0 * done / total)
            if self._artifact is None:
                key = "".join(letter if letter.isalnum() else "-" for letter in self._name.lower())
                self._artifact = create_progress_artifact(progress=percent, key=key, description=unit)
            else:
                update_progress_artifact(artifact_id=self._artifact, progress=percent)

    def note(self, text: str) -> None:
        self._logger.info("%s: %s", self._name, text)


@task(cache_policy=NO_CACHE, task_run_name="{name}")
def run_stage(
    name: str, planned: Planned, build: Build, recorder: Recorder, results: dict[str, Artifact]
) -> State[Any]:
    """Build one step of a chain, or say that it is done already."""
    logger = get_run_logger()
    artifact = recorder.conduct(planned, lambda: build(PrefectProgress(name, logger)))
    results[name] = artifact
    where = f"{artifact.kind}/{artifact.path.name}"
    if planned.action == "skip":
        return Completed(name="Skipped", message=f"up to date: {where}")
    logger.info("%s: built %s", name, where)
    return Completed(message=f"built {where}")


@flow(name="pipeline", flow_run_name="{config.name}", validate_parameters=True)
def pipeline(
    config: PipelineConfig, force: Sequence[str] = (), only: Sequence[str] = (), start: str | None = None
) -> None:
    """Run a whole chain, from text to report; what is done is skipped.

    Args:
        config: The chain, section by section.
        force: Stages to build anew although they are done.
        only: Stages to run; empty runs all.
        start: First stage to run; those before it must be done.
    """
    store = ArtifactStore(Path(config.store))
    steps = steps_of(config)
    _show_plan(plan(steps, store, force=force))
    _run_as_tasks(steps, store, Recorder.of(config, store), force=force, only=only, start=start)


def _run_as_tasks(
    steps: Sequence[Step],
    store: ArtifactStore,
    recorder: Recorder,
    *,
    force: Sequence[str] = (),
    only: Sequence[str] = (),
    start: str | None = None,
) -> None:
    results: dict[str, Artifact] = {}

    def conduct(planned: Planned, build: Build) -> Artifact:
        name = planned.step.name
        run_stage(name, planned, build, recorder, results)
        return results[name]

    run(steps, store, conduct=conduct, force=force, only=only, start=start)


def _show_plan(planned: Sequence[Planned]) -> None:
    rows = "\n".join(f"| {item.step.name} | {item.action} | {item.reason} |" for item in planned)
    text = f"| stage | action | why |\n|---|---|---|\n{rows}\n"
    create_markdown_artifact(key="plan", markdown=text, description="What this run does, and why.")


def _run_one(name: str, settings: Settings, inputs: Mapping[str, str] | None, store: str, label: str) -> None:
    where = ArtifactStore(Path(store))
    stage = stage_named(name, settings)
    step = Step(name, stage, settings, label=label or name, given=resolve_inputs(inputs or {}, where))
    _run_as_tasks([step], where, Recorder(where, pipeline=label or name))


@flow(name="corpus")
def corpus(store: str, settings: CorpusConfig = CorpusConfig(), label: str = "") -> None:  # noqa: B008
    """Gather text into Pile form. `store` is the folder of the artifact store."""
    _run_one("corpus", settings, None, store, label)


@flow(name="clean")
def clean(store: str, settings: CleanConfig, inputs: dict[str, str] | None = None, label: str = "") -> None:
    """Leave documents out of a corpus. `inputs` may name a corpus artifact: {"corpus": REFERENCE}."""
    _run_one("clean", settings, inputs, store, label)


@flow(name="tokenizer")
def tokenizer(store: str, settings: TokenizerConfig, inputs: dict[str, str] | None = None, label: str = "") -> None:
    """Train a tokenizer. `inputs` may name a corpus artifact: {"corpus": REFERENCE}."""
    _run_one("tokenizer", settings, inputs, store, label)


@flow(name="ingest")
def ingest(store: str, settings: IngestConfig, inputs: dict[str, str] | None = None, label: str = "") -> None:
    """Tokenize text into shards. `inputs`: {"corpus": REFERENCE, "tokenizer": REFERENCE}, each optional."""
    _run_one("ingest", settings, inputs, store, label)


@flow(name="index")
def index(store: str, settings: IndexConfig, inputs: dict[str, str], label: str = "") -> None:
    """Build sample indices. `inputs`: {"dataset0": REFERENCE, ...}."""
    _run_one("index", settings, inputs, store, label)


@flow(name="pretrain")
def pretrain(store: str, settings: PretrainConfig, inputs: dict[str, str], label: str = "") -> None:
    """Train a model. `inputs`: {"dataset0": REFERENCE, ...}."""
    _run_one("pretrain", settings, inputs, store, label)


@flow(name="reshape")
def reshape(store: str, settings: ReshapeConfig, inputs: dict[str, str], label: str = "") -> None:
    """Move a checkpoint to another layout or format. `inputs`: {"checkpoint": REFERENCE}."""
    _run_one("reshape", settings, inputs, store, label)


@flow(name="evaluate")
def evaluate(store: str, settings: EvaluateConfig, inputs: dict[str, str], label: str = "") -> None:
    """Measure a checkpoint. `inputs`: {"checkpoint": REFERENCE, "dataset": REFERENCE}."""
    _run_one("evaluate", settings, inputs, store, label)


@flow(name="report")
def report(store: str, settings: ReportConfig, inputs: dict[str, str], label: str = "") -> None:
    """Draw the report. `inputs`: checkpoint, dataset and evaluation.NAME references."""
    if "checkpoint" not in inputs:
        raise ConfigError("report needs inputs.checkpoint: a reference to the trained checkpoint.")
    _run_one("report", settings, inputs, store, label)
