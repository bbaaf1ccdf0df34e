"""Runs that begin with a checkpoint: continued pretraining, longer runs, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from command_line import shardline
from tiny_corpus import make_dataset, write_corpus

from contracts.artifact import Artifact
from contracts.errors import ConfigError
from contracts.store import ArtifactStore
from preprocessing.config import IngestConfig
from preprocessing.stages import INGEST
from training.config import PretrainConfig
from training.initial import INITIAL
from training.metrics import METRICS, read
from training.stage import PRETRAIN

pytestmark = pytest.mark.slow
OPTIMIZER = {"lr": 5e-3, "warmup_steps": 2, "decay_steps": 16, "ema_decay": 0.9}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return ArtifactStore(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def dataset(store: ArtifactStore, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_corpus(path)
    return make_dataset(store, path)


def _settings(**changes: Any) -> PretrainConfig:
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 32}
    settings = {
        "model": {**model, **changes.pop("model", {})},
        "optimizer": OPTIMIZER,
        "seq_length": 32,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_steps": 8,
        "split": "90,10,0",
        "valid_batches": 1,
        "threads_per_rank": 1,
    }
    return PretrainConfig.model_validate({**settings, **changes})


def _train(store: ArtifactStore, settings: PretrainConfig, label: str, **inputs: Artifact) -> Artifact:
    return PRETRAIN.run(settings, inputs=inputs, store=store, label=label)


def _lines(run: Artifact) -> dict[int, tuple[float, float, float]]:
    return {n["step"]: (n["loss_nats"], n["gradient_norm"], n["learning_rate"]) for n in read(run.path / METRICS)}


@pytest.fixture(scope="module")
def first(store: ArtifactStore, dataset: Artifact) -> Artifact:
    return _train(store, _settings(), "first", dataset0=dataset)


def test_a_run_goes_on_with_weights_alone_and_a_schedule_of_its_own(
    store: ArtifactStore, dataset: Artifact, first: Artifact
) -> None:
    settings = _settings(seed=7, layout={"tensor_parallel": 2})

    run = _train(store, settings, "more", dataset0=dataset, **{INITIAL: first})

    before, after = _lines(first), _lines(run)
    assert list(after) == list(range(1, 9))
    assert abs(after[1][0] - before[8][0]) < 0.3 < before[1][0] - after[1][0]
    assert after[1][2] == OPTIMIZER["lr"] / 2  # warmed up again
    assert run.summary["initial"]["step"] == 8
    assert first.fingerprint in str(run.manifest.inputs["initial"])


def test_a_longer_run_is_the_one_that_had_been_longer_from_the_start(
    store: ArtifactStore, dataset: Artifact, first: Artifact
) -> None:
    whole = _train(store, _settings(train_steps=14), "whole", dataset0=dataset)
    taken = {"optimizer": True, "position": True}

    longer = _train(store, _settings(train_steps=14, initial=taken), "longer", dataset0=dataset, **{INITIAL: first})

    assert _lines(longer) == {step: line for step, line in _lines(whole).items() if step > 8}
    assert longer.summary["consumed_samples"] == whole.summary["consumed_samples"]
    assert longer.summary["valid_loss_nats"] == whole.summary["valid_loss_nats"]
    assert "other_data" not in longer.summary["initial"]


def test_the_same_checkpoint_by_path_and_averaged_weights(
    store: ArtifactStore, dataset: Artifact, first: Artifact
) -> None:
    step = first.path / "step-00000008"
    settings = _settings(initial={"checkpoint": str(step), "averaged": True}, train_steps=3)

    run = _train(store, settings, "averaged", dataset0=dataset)

    assert _lines(first)[1][0] > _lines(run)[1][0] > _lines(first)[8][0] - 0.3


def test_other_data_in_mid_course_are_refused_with_both_indices_or_accepted_on_record(
    store: ArtifactStore, dataset: Artifact, first: Artifact
) -> None:
    taken = {"optimizer": True, "position": True}
    changes = {"train_steps": 10, "seed": 7}
    with pytest.raises(ConfigError, match=r"its index \w{12} and this run's, \w{12}, differ from sample \d+ of the 64"):
        _train(store, _settings(**changes, initial=taken), "other", dataset0=dataset, **{INITIAL: first})

    accepted = _settings(**changes, initial={**taken, "other_data": True})
    run = _train(store, accepted, "accepted", dataset0=dataset, **{INITIAL: first})

    assert "differ from sample" in run.summary["initial"]["other_data"]
    assert list(_lines(run)) == [9, 10]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"hidden_size": 64}}, "is 32 x 32 there and 32 x 64|is .* there and .* in the settings"),
        ({"model": {"activation": "relu"}}, "trained with model.activation"),
        ({"model": {"num_layers": 3}}, r"layers.2.attn.* is absent there"),
        ({"initial": {"optimizer": True, "position": True}}, "Set train_steps above 8"),
        (
            {"initial": {"optimizer": True, "position": True}, "train_steps": 20, "global_batch_size": 4},
            r"has used 64 rows in 8 steps, and global_batch_size \(4\) gives 32",
        ),
        ({"initial": {"step": 7}}, "step is 7, and"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_process_starts(
    changes: dict[str, Any],
    message: str,
    store: ArtifactStore,
    dataset: Artifact,
    first: Artifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("training.stage.run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(ConfigError, match=message):
        _train(store, _settings(**changes), "refused", dataset0=dataset, **{INITIAL: first})


def test_a_checkpoint_of_another_tokenizer_is_refused(store: ArtifactStore, first: Artifact, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl", documents=90)
    other = make_dataset(store, tmp_path / "corpus.jsonl")
    with pytest.raises(ConfigError, match="another tokenizer"):
        _train(store, _settings(), "refused", dataset0=other, **{INITIAL: first})
    again = IngestConfig(sources=(str(tmp_path / "corpus.jsonl"),), tokenizer=str(first.path / "tokenizer"), workers=1)
    same = INGEST.run(again, store=store, label="again")
    run = _train(store, _settings(train_steps=3), "again", dataset0=same, **{INITIAL: first})
    assert run.summary["step"] == 3


def test_from_takes_the_model_of_the_checkpoint(
    store: ArtifactStore, dataset: Artifact, first: Artifact, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["-s", "train_steps=9", "-s", "valid_batches=0"]
    words += ["-s", "initial.optimizer=true", "-s", "initial.position=true", "-s", "split='90,10,0'", "--no-track"]
    more = ["--dataset", dataset.path, "--store", store.root, "-o", tmp_path / "run", "--json"]

    outcome = shardline(capsys, "pretrain", "--from", first.path, *words, "-s", "optimizer.ema_decay=0.9", *more)

    assert outcome.code == 0, outcome.err
    assert outcome.data["step"] == 9 and outcome.data["model"]["hidden_size"] == 32
    assert outcome.data["initial"]["folder"] == str(first.path / "step-00000008")
    assert (outcome.data["seq_length"], outcome.data["consumed_samples"]) == (32, 72)  # 8 rows a step, as before
    assert "warning: the learning rate of step 8 was" in outcome.err and "optimizer.decay_steps" in outcome.err
