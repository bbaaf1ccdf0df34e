"""The pretrain stage as a user runs it: real dataset, real ranks, kills and requests to stop."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_corpus import make_dataset, write_corpus

from contracts.artifact import Artifact
from contracts.errors import ConfigError, ShardlineError
from contracts.store import ArtifactStore
from preprocessing.config import IngestConfig
from preprocessing.stages import INGEST
from training.config import PretrainConfig
from training.metrics import METRICS, read
from training.stage import PRETRAIN
from training.step_folders import list_checkpoints
from training.tracing import samples_of_step, trace_samples_of

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.slow


class RecordingProgress:
    def __init__(self) -> None:
        self.updates: list[float] = []
        self.notes: list[str] = []

    def update(self, done: float, *, total: float | None, unit: str, **numbers: float | str) -> None:
        self.updates.append(done)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    return path, write_corpus(path)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return ArtifactStore(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def dataset(store: ArtifactStore, corpus: tuple[Path, list[str]]) -> Artifact:
    return make_dataset(store, corpus[0])


def _settings(**changes: Any) -> PretrainConfig:
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32}
    batch = {"seq_length": 32, "micro_batch_size": 2, "global_batch_size": 8}
    more = {"train_steps": 40, "checkpoint_interval": 5, "split": "90,10,0", "threads_per_rank": 1}
    layout = {"tensor_parallel": 2}
    return PretrainConfig.model_validate({"model": model, "layout": layout, **batch, **more, **changes})


@pytest.fixture(scope="module")
def whole_run(store: ArtifactStore, dataset: Artifact) -> Artifact:
    return PRETRAIN.run(_settings(), inputs={"dataset0": dataset}, store=store, label="whole")


def _losses(path: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss_nats"], line["gradient_norm"]) for line in read(path / METRICS)]


def test_a_run_learns_and_says_so(whole_run: Artifact) -> None:
    summary = whole_run.summary
    losses = _losses(whole_run.path)

    assert [step for step, _, _ in losses] == list(range(1, 41))
    assert losses[-1][1] < losses[0][1] - 0.5
    assert summary["step"] == 40
    assert summary["tokens"] == 40 * 8 * 32
    assert summary["vocab_size"] == 300
    assert summary["valid_loss_nats"] < losses[0][1]
    assert [item.step for item in list_checkpoints(whole_run.path)] == [40, 35]
    last = max(read(whole_run.path / METRICS), key=lambda line: line["step"])
    assert last.keys() >= {"learning_rate", "tokens", "tokens_per_s", "model_flops_per_s", "matmul_peak_share"}
    assert last.keys() >= {"data_wait_s", "memory_bytes", "time"}


def test_a_finished_run_is_not_run_again(
    whole_run: Artifact, store: ArtifactStore, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.stage.run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    again = PRETRAIN.run(_settings(micro_batch_size=4), inputs={"dataset0": dataset}, store=store, label="whole")

    assert again.fingerprint == whole_run.fingerprint


def test_a_run_in_phases_validates_on_several_sets_and_is_traced(
    store: ArtifactStore, dataset: Artifact, corpus: tuple[Path, list[str]], tmp_path: Path
) -> None:
    write_corpus(tmp_path / "other.jsonl", documents=40)
    tokenizer = str(dataset.path / "tokenizer")
    ingest = IngestConfig(sources=(str(tmp_path / "other.jsonl"),), tokenizer=tokenizer, workers=1)
    other = INGEST.run(ingest, store=store, label="other")
    phases = [
        {"steps": 4, "seq_length": 16, "dataset_weights": [1, 0]},
        {"steps": 3, "dataset_weights": [1, 3]},
        {"dataset_weights": [0, 1]},
    ]
    sets = {"other": str(other.path), "same": str(dataset.path)}
    changes = {"phases": phases, "train_steps": 9, "valid_interval": 4, "valid_full": True, "valid_sets": sets}
    settings = _settings(**changes, eod_mask_loss=True, reset_attention_mask=True)

    run = PRETRAIN.run(settings, inputs={"dataset0": dataset, "dataset1": other}, store=store, label="phases")

    lines = {line["step"]: line for line in read(run.path / METRICS)}
    assert [lines[n]["tokens"] for n in (4, 5, 9)] == [4 * 8 * 16, 4 * 8 * 16 + 8 * 32, 4 * 8 * 16 + 5 * 8 * 32]
    assert [n for n, line in lines.items() if "valid_loss_nats/other" in line] == [4, 8, 9]
    assert lines[9].keys() >= {"valid_loss_nats", "valid_loss_nats/same"}
    assert run.summary["valid_loss_nats/other"] == lines[9]["valid_loss_nats/other"]
    assert run.summary["tokens"] == lines[9]["tokens"]
    traced = {step: trace_samples_of(run, samples_of_step(run, step), store) for step in (1, 2, 9)}
    assert {row["file"] for row in traced[1]} == {str(corpus[0])}
    assert {row["file"] for row in traced[9]} == {str(tmp_path / "other.jsonl")}
    assert sum(row["length"] for row in traced[2]) == 8 * 17
    with pytest.raises(ConfigError, match="has 2 weights for 1"):
        PRETRAIN.run(settings, inputs={"dataset0": dataset}, store=store, label="wrong")


def test_subsets_of_a_dataset_are_read_by_epochs_which_bound_the_steps(store: ArtifactStore, dataset: Artifact) -> None:
    blend = {"dataset_subsets": ["odd", "even"], "dataset_epochs": [1.5, 0.5], "layout": {}}
    with pytest.raises(ConfigError, match=r"Set train_steps to \d+ or less") as refused:
        PRETRAIN.run(_settings(**blend, train_steps=1000), inputs={"dataset0": dataset}, store=store, label="far")
    steps = int(str(refused.value).split("Set train_steps to ")[1].split()[0])

    run = PRETRAIN.run(_settings(**blend, train_steps=steps), inputs={"dataset0": dataset}, store=store, label="sub")

    rows = [row for step in range(1, steps + 1) for row in trace_samples_of(run, samples_of_step(run, step), store)]
    tokens = {name: sum(row["length"] for row in rows if row["subset"] == name) for name in ("odd", "even")}
    assert 2.5 < tokens["odd"] / tokens["even"] < 3.5


def test_every_part_of_a_step_is_found_in_its_source_text(
    whole_run: Artifact, store: ArtifactStore, corpus: tuple[Path, list[str]]
) -> None:
    path, texts = corpus
    rows = [
        row for step in range(1, 41) for row in trace_samples_of(whole_run, samples_of_step(whole_run, step), store)
    ]
    with_text = trace_samples_of(whole_run, samples_of_step(whole_run, 3), store, with_text=True)

    assert len({row["sample"] for row in rows}) == 320
    assert {row["file"] for row in rows} == {str(path)}
    assert {row["subset"] for row in rows} == {"even", "odd"}
    for row in with_text:
        assert row["text"].removesuffix("<|endoftext|>") in texts[row["record"] - 1]


class _Process:
    """The stage in a process of its own, in a store of its own that sees the same dataset."""

    def __init__(self, store: Path, dataset: Artifact, settings: PretrainConfig) -> None:
        self.store = store
        store.mkdir(exist_ok=True)
        (store / "settings.json").write_text(settings.model_dump_json(), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
        command = [sys.executable, "-m", "start_pretrain", str(store), str(dataset.path), str(store / "settings.json")]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    @property
    def folder(self) -> Path:
        (found,) = (self.store / "checkpoint").glob("run-*")
        return found

    def wait_for_step(self, step: int, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            lines = [line for path in self.store.glob(f"checkpoint/run-*/{METRICS}") for line in read(path)]
            if lines and lines[-1]["step"] >= step:
                return
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode}: {self.process.stderr.read()}")
            time.sleep(0.05)
        raise AssertionError(f"step {step} was not reached within {timeout_s} s")

    def finish(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors


def _rank_processes(store: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(store).encode() in command and b"training.rank" in command:
                found.append(int(entry.name))
    return found


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "store"
    assert _wait_until_gone(tmp_path / "store") == []


def _wait_until_gone(store: Path, timeout_s: float = 40) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while (left := _rank_processes(store)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def test_saving_behind_training_changes_no_number_and_no_byte(
    store: ArtifactStore, dataset: Artifact, whole_run: Artifact
) -> None:
    settings = _settings(async_save=True, checkpoint_interval=7)

    run = PRETRAIN.run(settings, inputs={"dataset0": dataset}, store=store, label="behind", force=True)

    assert _losses(run.path) == _losses(whole_run.path)
    whole = whole_run.path / "step-00000040"
    for path in (run.path / "step-00000040").iterdir():
        assert path.read_bytes() == (whole / path.name).read_bytes()
    assert [item.step for item in list_checkpoints(run.path, digests=True) if item.problem is None] == [40, 35]


@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_a_run_killed_with_9_goes_on_and_ends_bit_equal(
    victim: str, own_store: Path, dataset: Artifact, whole_run: Artifact
) -> None:
    first = _Process(own_store, dataset, _settings())
    first.wait_for_step(12)
    if victim == "launcher":
        first.process.kill()
        first.finish()
        assert _wait_until_gone(own_store) == []
    else:
        ranks = [
            pid for pid in _rank_processes(own_store) if b"launch" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(ranks[0], signal.SIGKILL)
        code, errors = first.finish()
        assert code == 1
        assert "launcher.log" in errors or "rank-" in errors

    code, errors = _Process(own_store, dataset, _settings()).finish()

    assert code == 0, errors
    (folder,) = (own_store / "checkpoint").glob("run-*")
    assert _losses(folder) == _losses(whole_run.path)
    ours = json.loads((folder / "manifest.json").read_text())["summary"]
    assert ours["valid_loss_nats"] == whole_run.summary["valid_loss_nats"]


EVERYTHING = {
    "precision": "fp16",
    "loss_scale": {"initial": 2.0**24, "window": 8},
    "optimizer": {"kind": "muon", "schedule": "wsd", "wsd_decay_steps": 10, "ema_decay": 0.9, "lr": 3e-3},
    "rampup_batch_size": [2, 2, 80],
    "stability": {"on_nonfinite": "skip", "on_spike": "skip", "spike_window": 16},
    "z_loss": 1e-4,
    "subset_losses": True,
    "train_steps": 32,
}


def test_a_rank_killed_in_the_middle_of_a_ramp_up_ends_the_job_within_seconds_and_it_goes_on_bit_equal(
    own_store: Path, dataset: Artifact, store: ArtifactStore
) -> None:
    whole = PRETRAIN.run(_settings(**EVERYTHING), inputs={"dataset0": dataset}, store=store, label="everything")
    first = _Process(own_store, dataset, _settings(**EVERYTHING))
    first.wait_for_step(12)
    ranks = [pid for pid in _rank_processes(own_store) if b"launch" not in Path(f"/proc/{pid}/cmdline").read_bytes()]

    os.kill(ranks[0], signal.SIGKILL)
    killed = time.monotonic()
    code, errors = first.finish()

    assert code == 1
    assert time.monotonic() - killed < 20
    assert "SIGKILL" in errors or "was killed" in errors or "rank-" in errors
    code, errors = _Process(own_store, dataset, _settings(**EVERYTHING)).finish()
    assert code == 0, errors
    (folder,) = (own_store / "checkpoint").glob("run-*")
    ours, theirs = list(read(folder / METRICS)), list(read(whole.path / METRICS))
    names = ("step", "loss_nats", "gradient_norm", "learning_rate", "batch_samples", "loss_scale", "tokens")
    names += ("skipped_steps", "event", "loss_nats/even", "loss_nats/odd", "valid_loss_nats")
    assert [[line.get(name) for name in names] for line in ours] == [
        [line.get(name) for name in names] for line in theirs
    ]
    assert [line["batch_samples"] for line in theirs] == [2] * 14 + [4] * 7 + [6] * 4 + [8] * 7
    assert theirs[0]["event"] == "skipped"
    assert whole.summary["skipped_steps"] == len(whole.summary["events"]) > 0
    assert samples_of_step(whole, 16) == range(32, 36)
    assert theirs[-1]["loss_nats"] < theirs[0]["loss_nats"] - 0.3


def test_sigterm_saves_ends_every_rank_and_the_next_start_goes_on(
    own_store: Path, dataset: Artifact, whole_run: Artifact
) -> None:
    first = _Process(own_store, dataset, _settings(checkpoint_interval=1000))
    first.wait_for_step(7)
    first.process.terminate()
    code, _ = first.finish()
    assert code == 128 + signal.SIGTERM
    assert _wait_until_gone(own_store) == []
    (saved,) = list_checkpoints(first.folder)
    assert saved.problem is None
    assert saved.step >= 7

    code, errors = _Process(own_store, dataset, _settings(checkpoint_interval=1000)).finish()

    assert code == 0, errors
    assert _losses(first.folder) == _losses(whole_run.path)


def test_a_damaged_newest_checkpoint_is_passed_over_by_name(
    tmp_path: Path, dataset: Artifact, whole_run: Artifact
) -> None:
    first = _Process(tmp_path / "store", dataset, _settings())
    first.wait_for_step(16)
    first.process.kill()
    first.finish()
    _wait_until_gone(tmp_path / "store")
    newest = list_checkpoints(first.folder)[0].path
    with (newest / "__0_0.distcp").open("r+b") as file:
        file.seek(2000)
        file.write(b"damage")
    progress = RecordingProgress()

    artifact = PRETRAIN.run(
        _settings(),
        inputs={"dataset0": dataset},
        store=ArtifactStore(tmp_path / "store"),
        progress=progress,
        label="run",
    )

    assert any(newest.name in note and "xxh3_128" in note for note in progress.notes)
    assert _losses(artifact.path) == _losses(whole_run.path)


def test_another_layout_ends_at_the_same_loss(store: ArtifactStore, dataset: Artifact, whole_run: Artifact) -> None:
    settings = _settings(layout={"pipeline_parallel": 2}, train_steps=40)

    other = PRETRAIN.run(settings, inputs={"dataset0": dataset}, store=store, label="other")

    assert other.fingerprint != whole_run.fingerprint
    assert other.summary["loss_nats"] == pytest.approx(whole_run.summary["loss_nats"], rel=1e-4)
    assert other.summary["valid_loss_nats"] == pytest.approx(whole_run.summary["valid_loss_nats"], rel=1e-4)


def test_an_interrupted_run_goes_on_with_more_data_parallel_ranks(own_store: Path, dataset: Artifact) -> None:
    """The degree of data parallelism is no part of a run's identity: same rows, same numbers up to rounding."""
    exact = {"precision": "float64", "train_steps": 20, "micro_batch_size": 2}
    first = _Process(own_store, dataset, _settings(layout={}, **exact))
    first.wait_for_step(7)
    first.process.terminate()
    first.finish()
    store = ArtifactStore(own_store)

    artifact = PRETRAIN.run(
        _settings(layout={"data_parallel": 2}, **exact), inputs={"dataset0": dataset}, store=store, label="run"
    )
    whole = PRETRAIN.run(
        _settings(layout={"data_parallel": 2}, **exact),
        inputs={"dataset0": dataset},
        store=ArtifactStore(own_store / "again"),
        label="whole",
    )

    assert artifact.path == first.folder
    assert artifact.fingerprint == whole.fingerprint
    for (step, *found), (_, *expected) in zip(_losses(artifact.path), _losses(whole.path), strict=True):
        assert found == pytest.approx(expected, rel=1e-12), step


def test_a_run_that_diverges_stops_with_a_message_and_keeps_its_checkpoint(tmp_path: Path, dataset: Artifact) -> None:
    store = ArtifactStore(tmp_path)
    optimizer = {"lr": 1e38, "min_lr": 1e38, "clip_grad": 0.0}
    settings = _settings(optimizer=optimizer, layout={}, checkpoint_interval=1)

    with pytest.raises(ShardlineError, match=r"Step \d+: the loss is .*Lower optimizer\.lr"):
        PRETRAIN.run(settings, inputs={"dataset0": dataset}, store=store, label="run")
    assert not list(tmp_path.glob("checkpoint/run-*/manifest.json"))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path: Path, dataset: Artifact) -> None:
    settings = _settings(model={**_settings().model.model_dump(), "vocab_size": 200})
    with pytest.raises(ConfigError, match=r"model\.vocab_size \(200\) is below the 300 tokens"):
        PRETRAIN.run(settings, inputs={"dataset0": dataset}, store=ArtifactStore(tmp_path), label="run")


def test_a_run_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pretrain has no dataset"):
        PRETRAIN.run(_settings(), store=ArtifactStore(tmp_path), label="run")
