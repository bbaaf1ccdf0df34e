"""What an MLflow database holds, for comparisons."""

import shutil
import sqlite3
from pathlib import Path
from typing import Any

from contracts.tracking import FINGERPRINT, Tracker


def everything(database: Path) -> dict[str, list[Any]]:
    """Read every row of every table."""
    with sqlite3.connect(database) as connection:
        tables = connection.execute("select name from sqlite_master where type = 'table'").fetchall()
        return {name: sorted(map(repr, connection.execute(f"select * from {name}"))) for (name,) in tables}


def described(tracker: Tracker) -> dict[str, Any]:
    """Describe all runs and models by fingerprint, without the ids that MLflow gives."""
    from mlflow import MlflowClient

    client = MlflowClient(tracker.uri)
    runs, names = {}, {}
    for run in client.search_runs([tracker.experiment_id]):
        names[run.info.run_id] = run.data.tags[FINGERPRINT]
        tags = {key: value for key, value in run.data.tags.items() if key != "mlflow.note.content"}
        history = {
            key: [(m.step, m.value, m.timestamp) for m in client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        }
        inputs = sorted((d.dataset.name, d.dataset.digest, d.tags[0].value) for d in run.inputs.dataset_inputs)
        runs[run.data.tags[FINGERPRINT]] = {
            "status": run.info.status,
            "times": (run.info.start_time, run.info.end_time),
            "tags": tags,
            "params": run.data.params,
            "history": history,
            "datasets": inputs,
        }
    models = {}
    for model in client.search_logged_models([tracker.experiment_id]):
        tags = {key: value for key, value in model.tags.items() if key.startswith("shardline.")}
        numbers = sorted((m.key, m.value, m.step, m.dataset_name, m.dataset_digest) for m in model.metrics or [])
        models[model.tags[FINGERPRINT]] = {"name": model.name, "tags": tags, "numbers": numbers}
    return {"runs": runs, "models": models}


def copy_template(template: Path, store: Path) -> None:
    """Give a store an empty database, which MLflow takes seconds to make."""
    store.mkdir(parents=True, exist_ok=True)
    shutil.copy(template, store / "mlflow.db")
