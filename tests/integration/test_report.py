"""A report given a checkpoint alone finds the run, its curve and its data through the store."""

import json
from pathlib import Path

import numpy as np
import pytest

from contracts.artifact import Artifact
from contracts.errors import ConfigError
from contracts.fingerprint import Recipe
from contracts.store import ArtifactStore, Workspace
from evaluation.config import ReportConfig
from evaluation.report import PAGE
from evaluation.stage import REPORT
from preprocessing.config import IngestConfig
from preprocessing.dataset.indexed_dataset import PairWriter
from preprocessing.stages import INGEST
from training.config import PretrainConfig
from training.stage import PRETRAIN

BYTES = Path(__file__).parents[1] / "cases" / "_tokenizers" / "byte257"
LINES = [{"step": step, "loss_nats": 5.0 - step} for step in (1, 2, 3)]


def dataset_in(store: ArtifactStore, label: str = "text") -> Artifact:
    def work(workspace: Workspace) -> dict[str, object]:
        writer = PairWriter(workspace.path / "shard", np.dtype("<u2"))
        writer.append(np.array([0, 1, 2, 3]), np.array([4]))
        writer.finish()
        return {"tokens": 4, "subsets": {"all": {"tokens": 4}}}

    return store.make("dataset", label, Recipe("ingest", 1, {"label": label}), work)


def run_in(store: ArtifactStore, *datasets: Artifact) -> Artifact:
    def work(workspace: Workspace) -> dict[str, object]:
        (workspace.path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
        return {"step": 3}

    inputs = {f"dataset{n}": item for n, item in enumerate(datasets)}
    recipe = Recipe("pretrain", 1, {}, {name: item.fingerprint for name, item in inputs.items()})
    return store.make("checkpoint", "gpt", recipe, work, inputs=inputs)


def reshaped_in(store: ArtifactStore, checkpoint: Artifact) -> Artifact:
    def work(workspace: Workspace) -> dict[str, object]:
        (workspace.path / "model.safetensors").write_bytes(b"")
        return {}

    recipe = Recipe("reshape", 1, {}, {"checkpoint": checkpoint.fingerprint})
    return store.make("model", "gpt-hf", recipe, work, inputs={"checkpoint": checkpoint})


def test_a_lone_checkpoint_brings_its_curve_and_its_data(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store")
    run = run_in(store, dataset_in(store))

    for checkpoint in (run, reshaped_in(store, run)):
        artifact = REPORT.run(ReportConfig(), inputs={"checkpoint": checkpoint}, store=store)

        assert artifact.summary["unigram_entropy_nats"] == pytest.approx(np.log(4))
        assert artifact.summary["final_loss_nats"] == 2.0
        assert artifact.summary["plots"] == ["loss.png", "tokens.png"]
        assert "text-" in (artifact.path / PAGE).read_text()


def test_the_entropy_of_one_of_several_datasets_is_not_shown(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store")
    run = run_in(store, dataset_in(store, "a"), dataset_in(store, "b"))

    artifact = REPORT.run(ReportConfig(), inputs={"checkpoint": run}, store=store)

    assert "unigram_entropy_nats" not in artifact.summary and artifact.summary["plots"] == ["loss.png"]


@pytest.mark.parametrize("name", ["checkpoint", "evaluation.x", "dataset"])
def test_an_input_of_the_wrong_kind_is_named(tmp_path: Path, name: str) -> None:
    store = ArtifactStore(tmp_path / "store")
    dataset = dataset_in(store)
    run = run_in(store, dataset)
    wrong = dataset if name == "checkpoint" else run

    with pytest.raises(ConfigError, match=f"the input {name} is {wrong.name}, an artifact of kind {wrong.kind}"):
        REPORT.run(ReportConfig(), inputs={"checkpoint": run, name: wrong}, store=store)


def test_a_model_that_learned_context_is_below_the_entropy_of_its_tokens(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    phrases = ["the shard line reads a block of tokens. ", "each layer writes what the model has seen. "]
    text.write_text("".join(json.dumps({"text": phrases[n % 2] * 20}) + "\n" for n in range(60)))
    store = ArtifactStore(tmp_path / "store")
    dataset = INGEST.run(IngestConfig(sources=(str(text),), tokenizer=str(BYTES), workers=1), store=store)
    model = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 32}
    batch = {"seq_length": 32, "micro_batch_size": 8, "global_batch_size": 8, "train_steps": 80, "valid_batches": 0}
    optimizer = {"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 5}
    settings = PretrainConfig.model_validate({"model": model, "optimizer": optimizer, "threads_per_rank": 1, **batch})

    run = PRETRAIN.run(settings, inputs={"dataset0": dataset}, store=store)
    summary = REPORT.run(ReportConfig(), inputs={"checkpoint": run}, store=store).summary

    assert summary["final_loss_nats"] < summary["unigram_entropy_nats"] < summary["first_loss_nats"]
