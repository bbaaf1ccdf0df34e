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


def test_a_run_of_shared_sequences_is_evaluated_and_converted_as_any_other(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store")
    write_corpus(tmp_path / "corpus.jsonl")
    dataset = make_dataset(store, tmp_path / "corpus.jsonl")
    other = ArtifactStore(tmp_path / "other")
    write_corpus(tmp_path / "corpus2.jsonl")
    other_dataset = make_dataset(other, tmp_path / "corpus2.jsonl")

    shared = _run(store, dataset, "shared", {"context_parallel": 2, "expert_parallel": 2})
    alone = _run(other, other_dataset, "alone", {})

    losses = [[line["loss_nats"] for line in read(run.path / METRICS)] for run in (shared, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)
    assert losses[0][-1] < losses[0][0]
    scores = [
        EVALUATE.run(EvaluateConfig(), inputs={"checkpoint": run, "dataset": data}, store=place).summary["metrics"]
        for run, data, place in ((shared, dataset, store), (alone, other_dataset, other))
    ]
    assert scores[0]["nats"] == pytest.approx(scores[1]["nats"], rel=1e-4)
    exported = RESHAPE.run(ReshapeConfig(to="huggingface"), inputs={"checkpoint": shared}, store=store)
    assert list(exported.path.rglob("*.safetensors"))
