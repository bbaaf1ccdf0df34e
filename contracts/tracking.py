"""MLflow, seen from here: one experiment of flat runs, datasets and models, all found by fingerprint.

This module owns the package mlflow and imports it inside functions, since that costs seconds.
What is written, and when, stands in `projection.py` and `following.py`. The database is a
projection of the manifests: it may be lost, be old or not answer, and nothing depends on it.
"""

import contextlib
import json
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from contracts.errors import ShardlineError
from contracts.metrics import is_loggable, legal_key, legal_name
from contracts.provenance import is_secret_name

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
STAGE, PIPELINE, FINGERPRINT = "shardline.stage", "shardline.pipeline", "shardline.fingerprint"
CONTENT, INPUTS = "shardline.content", "shardline.inputs"
PATH, STORE = "shardline.path", "shardline.store"
_MAX_VALUE, _MAX_BATCH, _MAX_METRICS, _MAX_TAG = 6000, 100, 1000, 8000
_model_lock = threading.Lock()


class TrackingError(ShardlineError):
    """MLflow does not answer or refuses; the artifacts are untouched and `lineage sync` catches up."""


@dataclass(frozen=True)
class Number:
    """One value of a metric; `model_id` and `dataset` (name, digest) tie it to what it measures."""

    key: str
    value: float
    time_ms: int
    step: int = 0
    model_id: str | None = None
    dataset: tuple[str, str] | None = None


@dataclass(frozen=True)
class DatasetUse:
    """A dataset that went into a run.

    Args:
        digest: Fingerprint of its artifact.
        context: "training", "evaluation" or "ancestor".
    """

    name: str
    digest: str
    uri: str
    context: str


@dataclass(frozen=True)
class RunView:
    """What the tracker holds of a run."""

    run_id: str
    status: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    datasets: frozenset[tuple[str, str, str]]
    models: frozenset[str]

    @property
    def fingerprint(self) -> str:
        return self.tags.get(FINGERPRINT, "")


class Tracker:
    """One MLflow experiment. It connects at the first use; every method may raise `TrackingError`.

    Args:
        store: Folder of the artifact store, which holds the database unless `uri` says otherwise.
        experiment: Name of the experiment; made when missing.
        uri: Address of MLflow: http(s)://..., sqlite:///..., or None for an sqlite file in the store.
        pipeline: Name of the chain for the tag of every run; the experiment's name if empty.
    """

    def __init__(self, store: Path, experiment: str, *, uri: str | None = None, pipeline: str = "") -> None:
        self.store = store.resolve()
        self.uri = uri or f"sqlite:///{self.store / 'mlflow.db'}"
        self.experiment = experiment
        self.pipeline = pipeline or experiment
        self._client: Any = None
        self._experiment_id = ""
        self._lock = threading.Lock()

    @property
    def experiment_id(self) -> str:
        """MLflow's id of the experiment."""
        self._connected()
        return self._experiment_id

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                try:
                    if self.uri.startswith("sqlite"):
                        self.store.mkdir(parents=True, exist_ok=True)
                    client = _quiet_client(self.uri)
                    self._experiment_id = self._experiment_of(client)
                except Exception as error:  # mlflow, sqlalchemy and requests each raise their own
                    raise self._failed("connect", error) from error
                self._client = client
            return self._client

    def _failed(self, what: str, error: Exception) -> TrackingError:
        reason = _without_password(" ".join(str(error).split()))[:300]
        return TrackingError(
            f"MLflow at {_without_password(self.uri)} failed in {what}: {reason}. The artifacts are safe; "
            "when it is back, `shardline lineage sync` writes what is missing."
        )

    def _experiment_of(self, client: Any) -> str:
        found = client.get_experiment_by_name(self.experiment)
        if found is None:
            # MLflow would put files below the working directory of whoever came first.
            is_local = self.uri.startswith("sqlite")
            where = (self.store / "mlartifacts").as_uri() if is_local else None
            return str(client.create_experiment(self.experiment, artifact_location=where))
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the MLflow client.

        Raises:
            TrackingError: It failed; the message names the address and what MLflow said.
        """
        client = self._connected()
        try:
            return getattr(client, method)(*arguments, **options)
        except Exception as error:
            raise self._failed(method, error) from error

    def runs(self, filter_text: str = "") -> list[RunView]:
        """List the runs of the experiment that a filter of MLflow selects; all if it is empty."""
        found: list[RunView] = []
        token = None
        while True:
            page = self.call("search_runs", [self.experiment_id], filter_text, page_token=token)
            found += [_view(run) for run in page]
            token = page.token
            if not token:
                return found

    def find_run(self, fingerprint: str, content: str | None = None) -> RunView | None:
        """Find the run of an artifact; where `content` is given, the one of this very build."""
        found = self.runs(f"tags.`{FINGERPRINT}` = '{fingerprint}'")
        return next((run for run in found if content in (None, run.tags.get(CONTENT))), None)

    def find_unfinished(self, fingerprint: str, store_id: str) -> RunView | None:
        """Find the run of a build that was begun in a store and not published."""
        found = self.runs(f"tags.`{FINGERPRINT}` = '{fingerprint}' and tags.`{STORE}` = '{store_id}'")
        return next((run for run in found if CONTENT not in run.tags), None)

    def create_run(self, name: str, tags: Mapping[str, str], *, start_ms: int) -> RunView:
        """Make a run; it is RUNNING until `set_status`."""
        tags = {PIPELINE: self.pipeline, **tags}
        options = {"start_time": start_ms, "tags": dict(tags), "run_name": name}
        return _view(self.call("create_run", self.experiment_id, **options))

    def set_status(self, run_id: str, status: Status, *, end_ms: int | None = None) -> None:
        """Say how a run stands."""
        if status == "RUNNING":
            self.call("update_run", run_id, status=status)
        else:
            self.call("set_terminated", run_id, status=status, end_time=end_ms)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags of a run; one over 8000 characters ends with what says so."""
        from mlflow.entities import RunTag

        items = [RunTag(key, fitted(value)) for key, value in tags.items()]
        for start in range(0, len(items), _MAX_BATCH):
            self.call("log_batch", run_id, tags=items[start : start + _MAX_BATCH])

    def log_params(self, run: RunView, params: Mapping[str, Any]) -> list[str]:
        """Log flat parameters; those that are there stay, since MLflow never changes one.

        Returns:
            The names that do not fit MLflow's limits, or are secret: they were not logged.
        """
        from mlflow.entities import Param

        items, left_out = [], []
        for key, value in params.items():
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            if not is_loggable(key) or len(text) > _MAX_VALUE or is_secret_name(key):
                left_out.append(key)
            elif legal_key(key) not in run.params:
                items.append(Param(legal_key(key), text))
        for start in range(0, len(items), _MAX_BATCH):
            self.call("log_batch", run.run_id, params=items[start : start + _MAX_BATCH])
        return left_out

    def log_numbers(self, run_id: str, numbers: Iterable[Number]) -> None:
        """Log metrics in batches; a number that is there already is not logged again.

        A model holds one number for each key, time and step: of several datasets, each later one
        is dated a millisecond after the one before.
        """
        from mlflow.entities import Metric

        items: list[Any] = []
        held: dict[str, set[tuple[str, int, str | None]]] = {}
        dates: set[tuple[str, str, int, int]] = set()
        for n in numbers:
            name, digest = n.dataset or (None, None)
            key, time_ms = legal_key(n.key), n.time_ms
            if n.model_id is not None:
                if n.model_id not in held:
                    held[n.model_id] = self._numbers_of_model(n.model_id, run_id)
                if (key, n.step, digest) in held[n.model_id]:
                    continue
                while (n.model_id, key, time_ms, n.step) in dates:
                    time_ms += 1
                dates.add((n.model_id, key, time_ms, n.step))
            items.append(Metric(key, n.value, time_ms, n.step, n.model_id, name, digest))
        for start in range(0, len(items), _MAX_METRICS):
            self.call("log_batch", run_id, metrics=items[start : start + _MAX_METRICS])

    def _numbers_of_model(self, model_id: str, run_id: str) -> set[tuple[str, int, str | None]]:
        model = self.call("get_logged_model", model_id)
        return {(m.key, m.step, m.dataset_digest) for m in model.metrics or [] if m.run_id == run_id}

    def log_datasets(self, run: RunView, uses: Sequence[DatasetUse]) -> None:
        """Name the datasets that went into a run."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        new = [use for use in uses if (use.name, use.digest, use.context) not in run.datasets]
        inputs = [
            DatasetInput(
                Dataset(use.name, use.digest, "local", json.dumps({"uri": use.uri})),
                [InputTag("mlflow.data.context", use.context)],
            )
            for use in new
        ]
        if inputs:
            self.call("log_inputs", run.run_id, datasets=inputs)

    def log_input_models(self, run: RunView, model_ids: Sequence[str]) -> None:
        """Name the models that went into a run (MLflow keeps them, its pages do not show them)."""
        from mlflow.entities import LoggedModelInput

        if model_ids:
            self.call("log_inputs", run.run_id, models=[LoggedModelInput(model_id) for model_id in model_ids])

    def log_text(self, run_id: str, text: str, name: str) -> None:
        """Keep a small text beside a run."""
        self.call("log_text", run_id, text, name)

    def find_model(self, fingerprint: str, content: str) -> str | None:
        """Find the id of the LoggedModel of a checkpoint or exported model."""
        where = f"tags.`{FINGERPRINT}` = '{fingerprint}'"
        for model in self.call("search_logged_models", [self.experiment_id], filter_string=where):
            if model.tags.get(CONTENT) == content:
                return str(model.model_id)
        return None

    def create_model(
        self, run: RunView, *, name: str, kind: str, tags: Mapping[str, str], params: Mapping[str, str], step: int
    ) -> str:
        """Make a LoggedModel by reference: nothing is uploaded. Returns its id."""
        import mlflow
        from mlflow.entities import LoggedModelOutput

        experiment_id = self.experiment_id
        try:
            with _model_lock, _address_of_process(mlflow, self.uri):
                model = mlflow.create_external_model(
                    name=legal_name(name),
                    source_run_id=run.run_id,
                    experiment_id=experiment_id,
                    model_type=kind,
                    tags={key: fitted(value) for key, value in tags.items()},
                    params=dict(params),
                )
        except Exception as error:
            raise self._failed("create_external_model", error) from error
        self.call("log_outputs", run.run_id, [LoggedModelOutput(model.model_id, step)])
        return str(model.model_id)

    def set_model_tags(self, model_id: str, tags: Mapping[str, str]) -> None:
        """Set tags of a LoggedModel."""
        self.call("set_logged_model_tags", model_id, {key: fitted(value) for key, value in tags.items()})


def load_mlflow() -> None:
    """Import MLflow, without telemetry, prints and long waits.

    Call it before a thread uses a tracker: a process that is forked while a thread imports
    inherits the lock of the half-imported module, and would wait for it for ever.
    """
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"  # MLflow knows only this word
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    os.environ["MLFLOW_TRUNCATE_LONG_VALUES"] = "false"
    # By default a dead server blocks each call for four minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "8")
    warnings.filterwarnings("ignore", module="mlflow")
    import mlflow.entities
    import mlflow.store.tracking.rest_store
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _quiet_client(uri: str) -> Any:
    load_mlflow()
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


@contextlib.contextmanager
def _address_of_process(mlflow: Any, uri: str) -> Iterator[None]:
    """Give one call the address of the whole process, which is all that it knows, and take it back.

    MLflow also puts it into the environment, where the next store of this process would find it.
    """
    variable = "MLFLOW_TRACKING_URI"
    before = os.environ.get(variable)
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before


def _view(run: Any) -> RunView:
    inputs = getattr(run.inputs, "dataset_inputs", None) or []
    outputs = getattr(run.outputs, "model_outputs", None) or []
    datasets = [
        (item.dataset.name, item.dataset.digest, tag.value)
        for item in inputs
        for tag in item.tags
        if tag.key == "mlflow.data.context"
    ]
    return RunView(
        run_id=run.info.run_id,
        status=run.info.status,
        tags=dict(run.data.tags),
        params=dict(run.data.params),
        datasets=frozenset(datasets),
        models=frozenset(item.model_id for item in outputs),
    )


def fitted(text: str) -> str:
    """Fit a text into a tag; what is too long says that it was cut."""
    mark = " ... (cut; see manifest.json)"
    return text if len(text) <= _MAX_TAG else text[: _MAX_TAG - len(mark)] + mark


def _without_password(text: str) -> str:
    return re.sub(r"://[^/@\s]+@", "://***@", text)
