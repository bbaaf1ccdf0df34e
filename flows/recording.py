"""Shows what the stages do in MLflow, as a projection that never slows or stops a stage.

The tracker connects at the first stage that really runs, since importing MLflow costs seconds.
"""

import logging
import os
from collections.abc import Callable

from contracts.artifact import Artifact
from contracts.store import ArtifactStore
from flows.engine import Planned
from flows.pipeline import PipelineConfig

log = logging.getLogger(__name__)


class Recorder:
    """Projects the stages of one chain.

    Args:
        store: Where the artifacts lie.
        pipeline: Name of the chain; a tag of its runs.
        experiment: MLflow experiment.
        uri: MLflow address; None is MLFLOW_TRACKING_URI, else an sqlite file in the store.
        is_on: False records nothing.
        note: Told when something could not be written.
    """

    def __init__(
        self,
        store: ArtifactStore,
        *,
        pipeline: str,
        experiment: str = "shardline",
        uri: str | None = None,
        is_on: bool = True,
        note: Callable[[str], None] = log.warning,
    ) -> None:
        self._store = store
        self._pipeline = pipeline
        self._experiment = experiment
        self._uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._is_on = is_on
        self._note = note

    @classmethod
    def of(cls, config: PipelineConfig, store: ArtifactStore, note: Callable[[str], None] = log.warning) -> "Recorder":
        """Make the recorder that a pipeline file asks for."""
        tracking = config.tracking
        name, experiment = config.name, tracking.experiment
        return cls(store, pipeline=name, experiment=experiment, uri=tracking.uri, is_on=tracking.is_on, note=note)

    def conduct(self, planned: Planned, build: Callable[[], Artifact]) -> Artifact:
        """Build a step and show it; a step that is done is left alone.

        Raises:
            BaseException: What `build` raises, and nothing else.
        """
        if planned.action == "skip" or not self._is_on:
            return build()
        from contracts.following import run_tracked
        from contracts.tracking import Tracker

        step = planned.step
        return run_tracked(
            build,
            tracker=Tracker(self._store.root, self._experiment, uri=self._uri, pipeline=self._pipeline),
            store=self._store,
            kind=step.stage.kind,
            label=step.label,
            recipe=planned.recipe,
            config=step.settings.model_dump(mode="json"),
            note=self._note,
        )


def sync_store(
    store: ArtifactStore, *, experiment: str, uri: str | None, note: Callable[[str], None]
) -> dict[str, int]:
    """Write all of a store to MLflow again; return how much was written, unchanged and repaired.

    Raises:
        TrackingError: MLflow does not answer.
    """
    from contracts.projection import sync
    from contracts.tracking import Tracker

    tracker = Tracker(store.root, experiment, uri=uri or os.environ.get("MLFLOW_TRACKING_URI"))
    report = sync(store, tracker, note=note)
    return {"written": report.written, "unchanged": report.unchanged, "repaired": report.repaired}
