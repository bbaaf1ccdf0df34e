"""Artifacts in a real MLflow database (sqlite)."""

import json
import os
import socket
from pathlib import Path

import pytest
from mlflow_database import copy_template, described, everything
from small_artifacts import make, make_chain, recipe_of, write

from contracts.artifact import MANIFEST
from contracts.projection import project, sync
from contracts.store import ArtifactStore
from contracts.tracking import Tracker, TrackingError


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    assert Tracker(folder, "none").experiment_id
    return folder / "mlflow.db"


@pytest.fixture
def store(tmp_path: Path, template: Path) -> ArtifactStore:
    copy_template(template, tmp_path / "store")
    return ArtifactStore(tmp_path / "store")


@pytest.fixture
def tracker(store: ArtifactStore) -> Tracker:
    return Tracker(store.root, "pile")


def client_of(tracker: Tracker):
    from mlflow import MlflowClient

    return MlflowClient(tracker.uri)


def test_every_artifact_is_one_flat_run_found_by_its_fingerprint(store: ArtifactStore, tracker: Tracker):
    chain = make_chain(store)

    report = sync(store, tracker)

    assert (report.written, report.unchanged) == (7, 0)
    runs = described(tracker)["runs"]
    assert set(runs) == {item.fingerprint for item in chain.values()}
    tags = runs[chain["reshaped"].fingerprint]["tags"]
    assert tags["shardline.stage"] == "reshape"
    assert tags["shardline.pipeline"] == "pile"
    assert tags["shardline.inputs"] == chain["checkpoint"].fingerprint
    assert not [run for run in runs.values() if "mlflow.parentRunId" in run["tags"]]
    assert {run["status"] for run in runs.values()} == {"FINISHED"}


def test_runs_carry_the_times_of_the_build(store: ArtifactStore, tracker: Tracker):
    corpus = make(store, "corpus", "corpus")

    project(corpus, store, tracker)

    provenance = corpus.manifest.provenance
    expected = tuple(round(provenance[key] * 1000) for key in ("started", "finished"))
    assert described(tracker)["runs"][corpus.fingerprint]["times"] == expected


def test_datasets_are_inputs_of_every_run_below_them_with_the_part_they_play(store: ArtifactStore, tracker: Tracker):
    chain = make_chain(store)
    sync(store, tracker)

    runs = described(tracker)["runs"]
    dataset = ("dataset/ingest", chain["dataset"].fingerprint)

    assert (*dataset, "training") in runs[chain["checkpoint"].fingerprint]["datasets"]
    assert (*dataset, "ancestor") in runs[chain["reshaped"].fingerprint]["datasets"]
    assert (*dataset, "evaluation") in runs[chain["evaluation"].fingerprint]["datasets"]
    found = client_of(tracker).search_runs([tracker.experiment_id], f"dataset.digest = '{dataset[1]}'")
    assert len(found) == 4


def test_checkpoints_are_models_by_reference_with_ancestors_and_a_final_number(store: ArtifactStore, tracker: Tracker):
    chain = make_chain(store)
    sync(store, tracker)

    models = described(tracker)["models"]

    assert set(models) == {chain["checkpoint"].fingerprint, chain["reshaped"].fingerprint}
    model = models[chain["checkpoint"].fingerprint]
    assert model["name"] == "gpt-1,3b-" + chain["checkpoint"].fingerprint[:12]
    assert model["tags"]["shardline.content"] == chain["checkpoint"].manifest.content
    assert model["tags"]["shardline.uri"] == chain["checkpoint"].path.as_uri()
    assert chain["corpus"].fingerprint in model["tags"]["shardline.ancestors"]
    final = ("final/final_loss_nats", 3.5, 150, "dataset/ingest", chain["dataset"].fingerprint)
    assert model["numbers"] == [final]
    assert final in models[chain["reshaped"].fingerprint]["numbers"]


def test_evaluations_are_tied_to_model_and_dataset(store: ArtifactStore, tracker: Tracker):
    chain = make_chain(store)

    project(chain["evaluation"], store, tracker)

    numbers = described(tracker)["models"][chain["reshaped"].fingerprint]["numbers"]
    tied = ("dataset/ingest", chain["dataset"].fingerprint)
    assert ("evaluate/acc:none", 0.5, 0, *tied) in numbers
    assert ("evaluate/all/bits_per_byte", 1.25, 0, *tied) in numbers
    inputs = client_of(tracker).get_run(tracker.find_run(chain["evaluation"].fingerprint).run_id).inputs.model_inputs
    assert len(inputs) == 2


def test_the_training_curve_is_read_from_the_checkpoint(store: ArtifactStore, tracker: Tracker):
    chain = make_chain(store)

    project(chain["checkpoint"], store, tracker)

    history = described(tracker)["runs"][chain["checkpoint"].fingerprint]["history"]
    assert [step for step, _, _ in history["train/loss_nats"]] == list(range(1, 151))
    assert history["train/loss_nats"][0] == (1, 4.99, 1_790_000_001_000)
    assert "train/learning_rate" in history


def test_notes_link_up_and_down(store: ArtifactStore, tracker: Tracker):
    chain = make_chain(store)
    sync(store, tracker)

    runs = {name: tracker.find_run(item.fingerprint) for name, item in chain.items()}
    note = runs["checkpoint"].tags["mlflow.note.content"]

    assert f"#/experiments/{tracker.experiment_id}/runs/{runs['dataset'].run_id}" in note
    assert f"#/experiments/{tracker.experiment_id}/runs/{runs['reshaped'].run_id}" in note
    assert f"/models/{next(iter(runs['checkpoint'].models))}" in note


def test_a_second_projection_changes_nothing(store: ArtifactStore, tracker: Tracker):
    chain = make_chain(store)
    sync(store, tracker)
    before = everything(store.root / "mlflow.db")

    for artifact in chain.values():
        project(artifact, store, tracker)
    report = sync(store, Tracker(store.root, "pile"))

    assert (report.written, report.unchanged) == (0, 7)
    assert everything(store.root / "mlflow.db") == before


@pytest.mark.slow
def test_a_projection_that_broke_off_is_completed_without_doubles(
    store: ArtifactStore, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
):
    chain = make_chain(store)
    sync(store, tracker)
    whole = described(tracker)
    steps = ["log_datasets", "log_numbers", "create_model", "set_tags", "log_input_models", "log_text"]
    for n, step in enumerate(steps):
        broken = Tracker(store.root, f"broken-{n}", pipeline="pile")

        def fail(*_: object, **__: object) -> None:
            raise TrackingError("down")

        with monkeypatch.context() as patch:
            patch.setattr(broken, step, fail)
            for artifact in chain.values():
                with pytest.raises(TrackingError):
                    project(artifact, store, broken)
                    raise TrackingError("stages without this step")

        sync(store, broken)

        assert described(broken) == whole, step


def test_a_lost_database_is_rebuilt_with_the_same_content(store: ArtifactStore, tracker: Tracker, template: Path):
    make_chain(store)
    sync(store, tracker)
    before = described(tracker)

    copy_template(template, store.root / "elsewhere")
    rebuilt = Tracker(store.root, "pile", uri=f"sqlite:///{store.root}/elsewhere/mlflow.db")
    sync(store, rebuilt)

    assert described(rebuilt) == before


def test_a_rebuild_with_other_bytes_is_a_run_and_a_model_of_its_own(store: ArtifactStore, tracker: Tracker):
    first = make(store, "checkpoint", "train", files={"w.bin": "one"})
    project(first, store, tracker)
    (first.path / MANIFEST).unlink()
    second = make(store, "checkpoint", "train", files={"w.bin": "two"})

    project(second, store, tracker)

    assert len(tracker.runs()) == 2
    assert tracker.find_model(first.fingerprint, first.manifest.content) != tracker.find_model(
        second.fingerprint, second.manifest.content
    )


def test_what_does_not_fit_a_parameter_is_whole_in_config_json(store: ArtifactStore, tracker: Tracker):
    chain = make_chain(store)

    run = project(chain["checkpoint"], store, tracker)

    run = tracker.find_run(run.fingerprint)
    assert run.params == {"optimizer.lr": "0.001"}
    assert run.tags["shardline.only_in_config_json"] == "long_text, hub_token"
    text = Path(client_of(tracker).download_artifacts(run.run_id, "config.json")).read_text()
    assert json.loads(text)["long_text"] == "x" * 7000


def test_more_parameters_than_one_request_takes_are_all_logged(store: ArtifactStore, tracker: Tracker):
    config = {f"setting_{n}": n for n in range(250)}

    project(make(store, "dataset", "ingest", config=config), store, tracker)

    assert len(tracker.runs()[0].params) == 250


def test_secrets_reach_neither_manifest_nor_database(store: ArtifactStore, tracker: Tracker):
    chain = make_chain(store)
    sync(store, tracker)

    assert "hf_secret" not in json.dumps(everything(store.root / "mlflow.db"))
    assert "hf_secret" not in json.dumps(chain["checkpoint"].manifest.config)
    for file in (store.root / "mlartifacts").rglob("*.json"):
        assert "hf_secret" not in json.dumps(json.loads(file.read_text()).get("config", ""))


def test_projecting_prints_nothing_and_sends_no_telemetry(
    store: ArtifactStore, tracker: Tracker, capfd: pytest.CaptureFixture[str]
):
    make_chain(store)

    sync(store, tracker)

    assert capfd.readouterr() == ("", "")
    assert (os.environ["MLFLOW_DISABLE_TELEMETRY"], os.environ["DO_NOT_TRACK"]) == ("true", "true")


def test_files_of_runs_lie_in_the_store_and_not_in_the_working_directory(
    store: ArtifactStore, tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)

    project(make(store, "dataset", "ingest"), store, tracker)

    assert [child.name for child in tmp_path.iterdir()] == ["store"]
    assert list((store.root / "mlartifacts").rglob("manifest.json"))


def test_a_dead_server_is_told_with_address_and_cure(store: ArtifactStore):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tracker = Tracker(store.root, "pile", uri=f"http://me:secret@127.0.0.1:{port}")

    with pytest.raises(TrackingError, match=r"lineage sync") as caught:
        sync(store, tracker)

    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_input_that_is_gone_still_counts_as_a_dataset(store: ArtifactStore, tracker: Tracker):
    dataset = make(store, "dataset", "ingest", label="pile")
    checkpoint = store.make(
        "checkpoint", "gpt", recipe_of("train", {"dataset": dataset}), write({"w": "1"}), inputs={"dataset": dataset}
    )
    (dataset.path / MANIFEST).unlink()

    project(checkpoint, store, tracker)

    assert described(tracker)["runs"][checkpoint.fingerprint]["datasets"] == [
        ("dataset/pile", dataset.fingerprint, "training")
    ]


def test_one_store_leaves_its_address_to_no_other(
    store: ArtifactStore, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for artifact in make_chain(store).values():
        project(artifact, store, tracker)  # makes a model, for which MLflow knows one address per process

    assert "MLFLOW_TRACKING_URI" not in os.environ
