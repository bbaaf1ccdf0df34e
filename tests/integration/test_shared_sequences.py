"""Sequences and experts shared among ranks, as a user runs it: pretrain, evaluate, convert."""

from pathlib import Path
from typing import Any

import pytest
from tiny_corpus import make_dataset, write_corpus

from contracts.artifact import Artifact
from contracts.store import ArtifactStore
from conversion.config import ReshapeConfig
from conversion.stage import RESHAPE
from evaluation.config import EvaluateConfig
from evaluation.stage import EVALUATE
from training.config import PretrainConfig
from training.metrics import METRICS, read
from training.stage import PRETRAIN

pytestmark = pytest.mark.slow
MODEL: dict[str, Any] = {
    "family": "mixtral",
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "max_position_embeddings": 48,
    "moe": {"num_experts": 4, "top_k": 2, "aux_loss_coef": 0.01},
}


def _run(store: ArtifactStore, dataset: Artifact, label: str, layout: dict[str, Any]) -> Artifact:
    settings = {"seq_length": 48, "micro_batch_size": 2, "global_batch_size": 8, "train_steps": 12, "split": "90,10,0"}
    model: dict[str, Any] = {"model": MODEL, "layout": layout, "threads_per_rank": 1}
    return PRETRAIN.run(
        PretrainConfig.model_validate({**settings, **model}), inputs={"dataset0": dataset}, store=store, label=label
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, dict[str, Any]]:
    return _trained_and_evaluated(tmp_path_factory.mktemp("alone"), {})[:2]


def _trained_and_evaluated(root: Path, layout: dict[str, Any]) -> tuple[Artifact, dict[str, Any], ArtifactStore]:
    store = ArtifactStore(root / "store")
    write_corpus(root / "corpus.jsonl")
    dataset = make_dataset(store, root / "corpus.jsonl")
    run = _run(store, dataset, "run", layout)
    inputs = {"checkpoint": run, "dataset": dataset}
    return run, dict(EVALUATE.run(EvaluateConfig(), inputs=inputs, store=store).summary["metrics"]), store


@pytest.mark.parametrize(
    "layout",
    [
        {"context_parallel": 2, "expert_parallel": 2},
        {"data_parallel": 2, "context_parallel": 2, "expert_parallel": 4},
    ],
    ids=str,
)
def test_a_run_of_shared_sequences_is_evaluated_and_converted_as_any_other(
    layout: dict[str, Any], alone: tuple[Artifact, dict[str, Any]], tmp_path: Path
) -> None:
    expected, expected_scores = alone

    run, scores, store = _trained_and_evaluated(tmp_path, layout)
    exported = RESHAPE.run(ReshapeConfig(to="huggingface"), inputs={"checkpoint": run}, store=store)

    losses, expected_losses = ([line["loss_nats"] for line in read(r.path / METRICS)] for r in (run, expected))
    assert losses == pytest.approx(expected_losses, rel=2e-5)
    assert losses[-1] < losses[0]
    assert scores["nats"] == pytest.approx(expected_scores["nats"], rel=1e-4)
    assert list(exported.path.rglob("*.safetensors"))
