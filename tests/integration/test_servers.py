"""Real Prefect and MLflow servers on loopback: deploy, run, skip, cancel, and the lineage they show."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.servers]

PIPELINE = """
name: tiny
store: {store}
corpus: {{max_bytes: 300_000, max_document_bytes: 8192, heldout_fraction: 0.1}}
tokenizer: {{vocab_size: 400}}
ingest: {{}}
pretrain:
  model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 2, max_position_embeddings: 32}}
  layout: {{tensor_parallel: 2}}
  seq_length: 32
  micro_batch_size: 4
  global_batch_size: 4
  train_steps: 4
reshape:
  - {{name: hf, to: huggingface}}
evaluate: {{max_documents: 5, of: [pretrain]}}
"""


def shardline(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli", *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=420, check=False)
    assert not check or run.returncode == 0, run.stderr + run.stdout
    return run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("servers") / "store"
    try:
        shardline("up", "--store", str(folder), "--prefect-port", "0", "--mlflow-port", "0")
        shardline("deploy", "--store", str(folder))
        yield folder
    finally:
        shardline("down", "--store", str(folder), check=False)


@pytest.fixture(scope="module")
def pipeline(store: Path) -> Path:
    path = store.parent / "tiny.yaml"
    path.write_text(PIPELINE.format(store=store))
    return path


def servers(store: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((store / ".servers" / "servers.json").read_text())
    return found


def client_of(store: Path) -> Any:
    os.environ["PREFECT_API_URL"] = servers(store)["prefect_url"] + "/api"
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    return temporary_settings({PREFECT_API_URL: os.environ["PREFECT_API_URL"]}), get_client


async def task_states(store: Path, run_id: str) -> dict[str, str]:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    settings, get_client = client_of(store)
    with settings:
        async with get_client() as client:
            chosen = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(run_id)]))
            runs = await client.read_task_runs(flow_run_filter=chosen)
    return {run.name: run.state_name for run in runs}


def test_a_deployment_run_completes_and_its_second_run_is_skipped(store: Path, pipeline: Path) -> None:
    first = json.loads(shardline("submit", str(pipeline), "--watch", "--json").stdout)
    second = json.loads(shardline("submit", str(pipeline), "--watch", "--json").stdout)

    built = asyncio.run(task_states(store, first["flow_run"]))
    stages = {"corpus", "tokenizer", "ingest", "heldout", "pretrain", "reshape.hf", "evaluate.pretrain"}
    assert set(built) == stages
    assert set(built.values()) == {"Completed"}
    again = asyncio.run(task_states(store, second["flow_run"]))
    assert again == dict.fromkeys(stages, "Skipped")


def test_mlflow_shows_the_model_with_its_data_and_its_evaluation(store: Path, pipeline: Path) -> None:
    shardline("submit", str(pipeline), "--watch")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=servers(store)["mlflow_url"])
    experiment = client.get_experiment_by_name("shardline")
    assert experiment is not None

    runs = {run.data.tags["shardline.stage"]: run for run in client.search_runs([experiment.experiment_id])}
    assert {"corpus", "tokenizer", "ingest", "pretrain", "reshape", "evaluate"} <= set(runs)
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    history = client.get_metric_history(runs["pretrain"].info.run_id, "train/loss_nats")
    assert [point.step for point in history] == [1, 2, 3, 4]
    names = [entry.dataset.name for entry in runs["evaluate"].inputs.dataset_inputs]
    assert any(name.startswith("dataset/") for name in names)
    models = client.search_logged_models([experiment.experiment_id])
    assert len(models) >= 2


def test_cancelling_a_training_run_ends_every_rank(store: Path, pipeline: Path) -> None:
    run = shardline("submit", str(pipeline), "-s", "pretrain.train_steps=100000", "--json")
    run_id = json.loads(run.stdout)["flow_run"]
    job = wait_for(lambda: next(iter(store.glob("checkpoint/*/logs/job.json")), None) and ranks_of(store), 120)
    assert job

    asyncio.run(cancel(store, run_id))

    assert wait_for(lambda: not ranks_of(store), 120)
    state = wait_for(lambda: asyncio.run(final_state(store, run_id)), 120)
    assert state in ("Cancelled", "Cancelling", "Crashed")


def ranks_of(store: Path) -> list[int]:
    """Processes of ranks whose job lies in this store."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"training.rank" in command and str(store).encode() in command:
                found.append(int(entry.name))
    return found


async def cancel(store: Path, run_id: str) -> None:
    from prefect.states import Cancelling

    settings, get_client = client_of(store)
    with settings:
        async with get_client() as client:
            await client.set_flow_run_state(UUID(run_id), Cancelling(), force=True)


async def final_state(store: Path, run_id: str) -> str | None:
    settings, get_client = client_of(store)
    with settings:
        async with get_client() as client:
            run = await client.read_flow_run(UUID(run_id))
    return run.state.name if run.state is not None and run.state.is_final() else None


def wait_for(condition: Any, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.5)
    return condition()
