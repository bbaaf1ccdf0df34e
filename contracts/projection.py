"""Artifacts as they appear in MLflow: one run each, their datasets, their models, links both ways.

Everything is derived from manifests and `metrics.jsonl`, so that a lost database is rebuilt by
`sync` with the same content. Projecting twice changes nothing.
"""

import contextlib
import fcntl
import json
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.artifact import MODEL_KINDS, Artifact, InputEntry
from contracts.changes import flatten
from contracts.errors import ShardlineError
from contracts.fingerprint import Recipe
from contracts.lease import lease_holder
from contracts.lineage import Relative, ancestors
from contracts.metrics import Point, Replays, is_loggable, numbers, read_points
from contracts.notes import write_notes
from contracts.provenance import masked
from contracts.store import ArtifactStore
from contracts.tracking import (
    CONTENT,
    FINGERPRINT,
    INPUTS,
    PATH,
    STAGE,
    STORE,
    DatasetUse,
    Number,
    RunView,
    Tracker,
)

METRICS_FILE = "metrics.jsonl"
PUSHED_STEP, RESUMED_FROM = "shardline.metrics_step", "shardline.resumed_from"
_PROJECTED, _VERSION = "shardline.projected", "1"
_DATASETS = ("corpus", "dataset", "index")
_LEFT_OUT = "shardline.only_in_config_json"


@dataclass(frozen=True)
class SyncReport:
    """What `sync` did: artifacts written, artifacts that stood there, runs whose state was false."""

    written: int
    unchanged: int
    repaired: int


def sync(store: ArtifactStore, tracker: Tracker, *, note: Callable[[str], None] | None = None) -> SyncReport:
    """Write every artifact of the store that the tracker lacks, and mend the state of dead runs.

    Args:
        note: Told of each artifact that is written.

    Raises:
        TrackingError: MLflow does not answer.
    """
    with one_at_a_time(store):  # two processes that make one new database spoil it
        repaired = repair(tracker, store)
    known = {(r.fingerprint, r.tags.get(CONTENT)) for r in tracker.runs() if _is_complete(r)}
    written = unchanged = 0
    for artifact in sorted(store.artifacts(), key=lambda item: float(item.manifest.provenance.get("finished", 0))):
        if (artifact.fingerprint, artifact.manifest.content) in known:
            unchanged += 1
            continue
        project(artifact, store, tracker)
        written += 1
        if note is not None:
            note(f"{artifact.kind}/{artifact.name}")
    return SyncReport(written, unchanged, repaired)


def repair(tracker: Tracker, store: ArtifactStore, *, except_fingerprint: str = "") -> int:
    """Mend runs that say RUNNING although nobody works on them, as after kill -9; returns how many."""
    repaired = 0
    mine = f"attributes.status = 'RUNNING' and tags.`{STORE}` = '{store_id(store)}'"
    for run in tracker.runs(mine):
        if run.fingerprint == except_fingerprint:
            continue
        if lease_holder(store.root / run.tags.get(PATH, "unknown")) is None:
            tracker.set_status(run.run_id, "KILLED", end_ms=_now_ms())
            repaired += 1
    return repaired


def project(artifact: Artifact, store: ArtifactStore, tracker: Tracker) -> RunView:
    """Write one artifact to the tracker: create its run or complete it. A second time changes nothing.

    Raises:
        TrackingError: MLflow does not answer or refuses; what was written is completed the next time.
    """
    with one_at_a_time(store):
        return _project(artifact, store, tracker)


def _project(artifact: Artifact, store: ArtifactStore, tracker: Tracker) -> RunView:
    manifest = artifact.manifest
    run = tracker.find_run(artifact.fingerprint, manifest.content)
    if run is not None and _is_complete(run):
        return run
    run = run or tracker.find_unfinished(artifact.fingerprint, store_id(store))
    if run is None:
        tags = run_tags(store, manifest.recipe, artifact.path)
        run = tracker.create_run(artifact.name, tags, start_ms=_ms(manifest.provenance.get("started")))
    finished_ms = _ms(manifest.provenance.get("finished"))
    tracker.set_tags(run.run_id, {CONTENT: manifest.content})
    tracker.set_status(run.run_id, "FINISHED", end_ms=finished_ms)
    relatives = ancestors(store, artifact)
    uses = _dataset_uses(artifact, relatives)
    left_out = log_settings(tracker, run, manifest.config)
    tracker.log_text(run.run_id, manifest.to_json(), "manifest.json")
    for name in artifact.path.glob("*.html") if artifact.kind == "report" else ():
        tracker.log_text(run.run_id, name.read_text(encoding="utf-8"), name.name)
    tracker.log_datasets(run, uses)
    push_history(tracker, run, artifact.path / METRICS_FILE)
    above = [r.item for r in relatives if isinstance(r.item, Artifact) and r.item.kind in MODEL_KINDS]
    models = {item.fingerprint: item for item in above}
    model_ids = {fp: _model_of(tracker, store, item) for fp, item in models.items()}
    own = None
    if artifact.kind in MODEL_KINDS:
        own = _own_model(tracker, run, artifact, relatives)
        tracker.log_numbers(run.run_id, _final_numbers(artifact, relatives, uses, own, finished_ms))
    if artifact.kind == "evaluation":
        direct = [model_ids[e.fingerprint] for e in manifest.inputs.values() if e.fingerprint in model_ids]
        measured = [(use.name, use.digest) for use in uses if use.context == "evaluation"]
        tracker.log_numbers(run.run_id, _evaluation_numbers(artifact, direct, measured, finished_ms))
    else:
        tracker.log_numbers(run.run_id, _summary_numbers(artifact, finished_ms))
    tracker.log_input_models(run, [i for i in model_ids.values() if i])
    tags = {
        "mlflow.user": str(manifest.provenance.get("user", "")),
        "mlflow.source.git.commit": str(manifest.provenance.get("commit", "")),
        **({_LEFT_OUT: ", ".join(left_out)} if left_out else {}),
    }
    tracker.set_tags(run.run_id, tags)
    write_notes(tracker, store, artifact, relatives)
    tracker.set_tags(run.run_id, {_PROJECTED: _VERSION})
    return run


def _is_complete(run: RunView) -> bool:
    return run.status == "FINISHED" and run.tags.get(_PROJECTED) == _VERSION


def run_tags(store: ArtifactStore, recipe: Recipe, path: Path) -> dict[str, str]:
    """Return the tags by which a run is found, also while its artifact is still being built."""
    return {
        STAGE: recipe.stage,
        FINGERPRINT: recipe.fingerprint,
        INPUTS: ",".join(recipe.inputs.values()),
        PATH: store.relative(path),
        STORE: store_id(store),
    }


def store_id(store: ArtifactStore) -> str:
    """Return the name that a store keeps when it is moved: many stores may share one MLflow server."""
    path = store.root / ".store-id"
    with contextlib.suppress(OSError):
        store.root.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(uuid.uuid4().hex)
        return path.read_text(encoding="utf-8").strip()
    return str(store.root.resolve())


def log_settings(tracker: Tracker, run: RunView, config: Mapping[str, Any]) -> list[str]:
    """Log settings as flat parameters, and all of them in `config.json`; returns what is only there."""
    tracker.log_text(run.run_id, json.dumps(masked(config), indent=1, sort_keys=True, default=str), "config.json")
    return tracker.log_params(run, flatten(config) if config else {})


def push_history(tracker: Tracker, run: RunView, path: Path) -> None:
    """Push the lines of `metrics.jsonl` that the run does not hold yet."""
    points, _ = read_points(path)
    replays = Replays()
    fresh = list(replays.fresh(points))
    push_points(tracker, run.run_id, fresh, repeated=replays.resumed_from, pushed_step=pushed_step(run))


def pushed_step(run: RunView) -> int:
    """Return the last step whose metrics the run holds; -1 for none."""
    text = run.tags.get(PUSHED_STEP, "-1")
    return int(text) if text.lstrip("-").isdigit() else -1


def push_points(
    tracker: Tracker,
    run_id: str,
    points: list[Point],
    *,
    repeated: Collection[int],
    pushed_step: int,
    batch: int = 1000,
) -> int:
    """Push points in batches of at most `batch` numbers, and remember in the run how far it got.

    Args:
        points: In the order of the file, without the steps that a resume repeated alike.
        repeated: Steps that a resumed run repeated with another loss; both values are kept.
        pushed_step: The run holds the steps up to here.

    Returns:
        The last step that the run holds now.
    """
    fresh = [point for point in points if point.step > pushed_step or point.step in repeated]
    last = pushed_step
    queue: list[Number] = []
    for n, point in enumerate(fresh):
        queue += [Number(key, value, point.time_ms, point.step) for key, value in point.values.items()]
        last = max(last, point.step)
        is_end = n + 1 == len(fresh)
        if queue and (is_end or len(queue) + len(fresh[n + 1].values) > batch):
            tracker.log_numbers(run_id, queue)
            tags = {PUSHED_STEP: str(last)}
            if repeated:
                tags[RESUMED_FROM] = str(min(repeated))
            tracker.set_tags(run_id, tags)
            queue = []
    return last


def _dataset_uses(artifact: Artifact, relatives: list[Relative]) -> list[DatasetUse]:
    """Name each dataset above an artifact once, with the most direct part it played."""
    context = {"checkpoint": "training", "evaluation": "evaluation"}.get(artifact.kind, "ancestor")
    uses: dict[str, DatasetUse] = {}
    barrier: int | None = None  # below a model or tokenizer, data served that and not this run
    for relative in relatives:
        if barrier is not None and relative.depth <= barrier:
            barrier = None
        is_behind = barrier is not None
        if barrier is None and relative.item.kind not in _DATASETS:
            barrier = relative.depth
        if relative.item.kind not in _DATASETS:
            continue
        is_used = not is_behind and (relative.item.kind == "dataset" or relative.depth == 1)
        known = uses.get(relative.item.fingerprint)
        if known is None or (known.context == "ancestor" and is_used):
            role = context if is_used else "ancestor"
            uses[relative.item.fingerprint] = _use(relative.item, role)
    return list(uses.values())


def _use(item: Artifact | InputEntry, context: str) -> DatasetUse:
    if isinstance(item, Artifact):
        return DatasetUse(f"{item.kind}/{item.manifest.label}", item.fingerprint, item.path.resolve().as_uri(), context)
    label = Path(item.path).name.rpartition("-")[0]
    return DatasetUse(f"{item.kind}/{label or 'gone'}", item.fingerprint, item.path, context)


def _model_of(tracker: Tracker, store: ArtifactStore, item: Artifact) -> str | None:
    """Return the LoggedModel of a checkpoint or export, projecting that first if need be."""
    found = tracker.find_model(item.fingerprint, item.manifest.content)
    if found is None:
        _project(item, store, tracker)
        found = tracker.find_model(item.fingerprint, item.manifest.content)
    return found


def _own_model(tracker: Tracker, run: RunView, artifact: Artifact, relatives: list[Relative]) -> str:
    found = tracker.find_model(artifact.fingerprint, artifact.manifest.content)
    if found is not None:
        return found
    above = dict.fromkeys(r.item.fingerprint for r in relatives)
    tags = {
        FINGERPRINT: artifact.fingerprint,
        CONTENT: artifact.manifest.content,
        "shardline.uri": artifact.path.resolve().as_uri(),
        "shardline.bytes": str(sum(entry.size_bytes for entry in artifact.manifest.files)),
        "shardline.ancestors": ",".join(above),
        STAGE: artifact.manifest.recipe.stage,
    }
    return tracker.create_model(
        run,
        name=artifact.name,
        kind=f"shardline-{artifact.kind}",
        tags=tags,
        params={key: f"{value:g}" for key, value in numbers(artifact.summary).items() if is_loggable(key)},
        step=_step(artifact),
    )


def _step(artifact: Artifact) -> int:
    step = numbers(artifact.summary).get("step", 0)
    return int(step)


def _final_numbers(
    artifact: Artifact, relatives: list[Relative], uses: list[DatasetUse], model_id: str, time_ms: int
) -> Iterator[Number]:
    """Tie one number to model and training data: MLflow shows a model's data only through its metrics."""
    sources = [artifact, *(r.item for r in relatives if isinstance(r.item, Artifact) and r.item.kind in MODEL_KINDS)]
    key, value, origin = "model/size_bytes", float(sum(e.size_bytes for e in artifact.manifest.files)), artifact
    for source in sources:
        losses = {k: v for k, v in numbers(source.summary).items() if "loss" in k}
        if losses:
            name = next((k for k in ("final_loss_nats", "loss_nats") if k in losses), next(iter(losses)))
            key, value, origin = f"final/{name}", losses[name], source
            break
    datasets = [use for use in uses if use.name.startswith("dataset/")]
    trained_on = [use for use in datasets if use.context == "training"] or datasets
    for use in trained_on:
        yield Number(key, value, time_ms, _step(origin), model_id, (use.name, use.digest))


def _summary_numbers(artifact: Artifact, time_ms: int) -> Iterator[Number]:
    for key, value in numbers(artifact.summary).items():
        name = f"{artifact.manifest.recipe.stage}/{key}"
        if is_loggable(name):
            yield Number(name, value, time_ms, _step(artifact))


def _evaluation_numbers(
    artifact: Artifact, model_ids: list[str | None], datasets: list[tuple[str, str]], time_ms: int
) -> Iterator[Number]:
    """Tie the metrics of an evaluation to the model and to each dataset that it measured on."""
    for key, value in numbers(artifact.summary).items():
        name = f"{artifact.manifest.recipe.stage}/{key.removeprefix('metrics/')}"
        if not is_loggable(name):
            continue
        if not key.startswith("metrics/"):
            yield Number(name, value, time_ms)
            continue
        for model_id in model_ids or [None]:
            yield from (Number(name, value, time_ms, 0, model_id, dataset) for dataset in datasets)
            if not datasets:
                yield Number(name, value, time_ms, 0, model_id)


@contextlib.contextmanager
def one_at_a_time(store: ArtifactStore, *, wait_s: float = 120.0) -> Iterator[None]:
    """Let one process at a time look for a run and make it, so that none is made twice."""
    deadline = time.monotonic() + wait_s
    try:
        store.root.mkdir(parents=True, exist_ok=True)
        file = (store.root / ".tracking.lock").open("a")
    except OSError:  # a read-only store: nobody builds there, so nobody else projects
        yield
        return
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ShardlineError(
                        f"{file.name} is held by another process that writes to MLflow. Try again later."
                    ) from None
                time.sleep(0.05)
            except OSError:
                break  # a disk without flock
        yield


def _ms(seconds: object) -> int:
    return round(float(seconds) * 1000) if isinstance(seconds, int | float) else _now_ms()


def _now_ms() -> int:
    return round(time.time() * 1000)
