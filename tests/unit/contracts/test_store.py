import errno
import json
import mmap
import os
from dataclasses import replace
from pathlib import Path

import pytest
from small_artifacts import folder_names, make, make_chain, recipe_of, write

from contracts.artifact import MANIFEST, read_artifact
from contracts.errors import ConfigError, InputError, ShardlineError
from contracts.store import ArtifactStore, Workspace


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def must_not_run(_: Workspace) -> dict:
    raise AssertionError("built again")


def fail(workspace: Workspace) -> dict:
    (workspace.path / "part.bin").write_text("half")
    raise RuntimeError("broken")


def test_what_is_made_is_found_and_not_made_again(store: ArtifactStore):
    made = store.make("dataset", "pile", recipe_of(a=1), write({"x/y.bin": "1"}, {"tokens": 3}))

    again = store.make("dataset", "pile", recipe_of(a=1), must_not_run)

    assert again == made
    assert made.summary == {"tokens": 3}
    assert folder_names(made.path) == ["manifest.json", "recipe.json", "x"]
    assert [entry.path for entry in made.manifest.files] == ["x/y.bin"]


def test_another_label_is_the_same_artifact(store: ArtifactStore):
    made = make(store, "dataset", "ingest", label="old")

    assert make(store, "dataset", "ingest", label="new") == made
    assert store.locate("dataset", "new", recipe_of("ingest")) == made.path


def test_a_moved_store_keeps_its_artifacts(store: ArtifactStore, tmp_path: Path):
    chain = make_chain(store)
    store.root.rename(tmp_path / "elsewhere")

    moved = ArtifactStore(tmp_path / "elsewhere")

    checkpoint = moved.find(chain["checkpoint"].name)
    assert checkpoint.fingerprint == chain["checkpoint"].fingerprint
    assert moved.input_artifact(checkpoint.manifest.inputs["index"]).path == (
        tmp_path / "elsewhere" / "index" / chain["index"].path.name
    )
    assert str(tmp_path) not in (checkpoint.path / MANIFEST).read_text()


def test_a_build_that_fails_leaves_a_partial_that_goes_on(store: ArtifactStore):
    with pytest.raises(RuntimeError):
        store.make("dataset", "pile", recipe_of(), fail)
    assert store.state("dataset", "pile", recipe_of()) == "partial"
    seen = []

    def go_on(workspace: Workspace) -> dict:
        seen.append((workspace.is_resumed, (workspace.path / "part.bin").read_text()))
        return {}

    artifact = store.make("dataset", "pile", recipe_of(), go_on)

    assert seen == [(True, "half")]
    assert len(artifact.manifest.provenance["attempts"]) == 2


def test_a_build_that_refuses_at_once_leaves_nothing(store: ArtifactStore):
    def refuse(workspace: Workspace) -> dict:
        workspace.progress.update(1, total=2, unit="records")
        raise ShardlineError("no")

    with pytest.raises(ShardlineError):
        store.make("dataset", "pile", recipe_of(), refuse)

    assert not store.locate("dataset", "pile", recipe_of()).exists()


def test_a_discarded_build_leaves_nothing(store: ArtifactStore):
    def refuse(workspace: Workspace) -> dict:
        (workspace.path / "deep").mkdir()
        (workspace.path / "deep" / "x").write_text("x")
        workspace.discard()
        raise ShardlineError("no")

    with pytest.raises(ShardlineError):
        store.make("dataset", "pile", recipe_of(), refuse)

    assert not store.locate("dataset", "pile", recipe_of()).exists()


def test_ctrl_c_publishes_nothing_and_frees_the_lease(store: ArtifactStore):
    def interrupted(workspace: Workspace) -> dict:
        (workspace.path / "part.bin").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.make("dataset", "pile", recipe_of(), interrupted)

    assert store.state("dataset", "pile", recipe_of()) == "partial"


def test_a_file_of_another_size_makes_the_artifact_corrupt_and_it_is_made_anew(store: ArtifactStore):
    made = store.make("dataset", "pile", recipe_of(), write({"data.bin": "good"}))
    (made.path / "data.bin").write_text("bad")
    assert store.state("dataset", "pile", recipe_of()) == "corrupt"

    again = store.make("dataset", "pile", recipe_of(), write({"data.bin": "good"}))

    assert (again.path / "data.bin").read_text() == "good"


def test_a_rebuild_leaves_mapped_files_of_its_readers_intact(store: ArtifactStore):
    made = store.make("dataset", "pile", recipe_of(), write({"a.bin": "old!", "b.bin": "old!"}))
    with (made.path / "a.bin").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (made.path / "b.bin").unlink()

        store.make("dataset", "pile", recipe_of(), write({"a.bin": "new!", "b.bin": "new!"}))

        assert mapped[:] == b"old!"
        mapped.close()


def test_an_input_that_was_rebuilt_with_other_bytes_makes_its_users_stale(store: ArtifactStore):
    dataset = make(store, "dataset", "ingest", files={"data.bin": "one"})
    make(store, "index", "index", {"dataset": dataset})
    (dataset.path / MANIFEST).unlink()
    rebuilt = make(store, "dataset", "ingest", files={"data.bin": "two"})

    assert store.state("index", "index", recipe_of("index", {"dataset": rebuilt}), {"dataset": rebuilt}) == "stale"


def test_records_of_the_run_are_no_part_of_the_content(store: ArtifactStore):
    one = make(store, "checkpoint", "train", files={"w.bin": "w", "metrics.jsonl": "1", "logs/0.txt": "a"})
    (one.path / MANIFEST).unlink()
    two = make(store, "checkpoint", "train", files={"w.bin": "w", "metrics.jsonl": "2", "logs/0.txt": "b"})

    assert one.manifest.content == two.manifest.content


def test_force_builds_what_is_done_from_nothing(store: ArtifactStore):
    make(store, "dataset", "ingest", files={"old.bin": "1"})

    made = store.make("dataset", "ingest", recipe_of("ingest"), write({"new.bin": "2"}), force=True)

    assert [entry.path for entry in made.manifest.files] == ["new.bin"]


def test_digests_that_the_writer_hands_over_are_not_computed_again(store: ArtifactStore):
    def work(workspace: Workspace) -> dict:
        (workspace.path / "w.bin").write_text("w")
        workspace.known_digests["w.bin"] = "a" * 64
        return {}

    made = store.make("checkpoint", "gpt", recipe_of(), work)

    assert made.manifest.files[0].sha256 == "a" * 64


def test_leftovers_of_killed_writes_are_cleared_at_publication(store: ArtifactStore):
    made = store.make("dataset", "pile", recipe_of(), write({"a.bin": "1", "sub/b.bin.tmp": "half"}))

    assert [entry.path for entry in made.manifest.files] == ["a.bin"]
    assert not (made.path / "sub" / "b.bin.tmp").exists()


def test_a_link_that_leads_out_of_the_artifact_is_refused(store: ArtifactStore, tmp_path: Path):
    (tmp_path / "raw.txt").write_text("x")

    def work(workspace: Workspace) -> dict:
        (workspace.path / "raw.txt").symlink_to(tmp_path / "raw.txt")
        return {}

    with pytest.raises(ShardlineError, match=r"symbolic link to .*Copy the file"):
        store.make("corpus", "raw", recipe_of(), work)


def test_a_full_disk_is_told_with_path_and_cure(store: ArtifactStore):
    def work(workspace: Workspace) -> dict:
        raise OSError(errno.ENOSPC, "No space left on device", str(workspace.path / "data.bin"))

    with pytest.raises(ShardlineError, match=r"data\.bin: No space left on device\. Free some space") as caught:
        store.make("dataset", "pile", recipe_of(), work)
    assert not isinstance(caught.value, ConfigError)


def test_other_errors_of_the_system_are_not_dressed_up(store: ArtifactStore):
    def work(_: Workspace) -> dict:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    with pytest.raises(ConnectionRefusedError):
        store.make("dataset", "pile", recipe_of(), work)


def test_a_store_under_a_file_is_told_with_the_cure(tmp_path: Path):
    (tmp_path / "store").write_text("I am a file")

    with pytest.raises(ShardlineError, match="stands where a folder is needed"):
        make(ArtifactStore(tmp_path / "store"), "dataset", "ingest")


def test_a_complete_store_is_read_without_writing(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch):
    made = make(store, "dataset", "ingest")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "replace", "link", "unlink", "utime"):
        monkeypatch.setattr(os, name, refuse)

    assert make(store, "dataset", "ingest") == made
    assert store.find(made.name) == made


def test_output_holds_the_artifact_itself(tmp_path: Path):
    store = ArtifactStore(tmp_path / "store", output=tmp_path / "out")

    made = make(store, "dataset", "ingest")

    assert made.path == tmp_path / "out"
    assert (tmp_path / "out" / MANIFEST).is_file()
    assert make(store, "dataset", "ingest") == made


@pytest.mark.parametrize("what", ["foreign", "artifact", "partial"])
def test_output_that_holds_something_else_is_refused_and_kept(tmp_path: Path, what: str):
    store = ArtifactStore(tmp_path / "store", output=tmp_path / "out")
    if what == "foreign":
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("years of work")
    elif what == "artifact":
        make(store, "dataset", "other")
    else:
        with pytest.raises(RuntimeError):
            store.make("dataset", "x", recipe_of("other"), fail)
    before = folder_names(tmp_path / "out")

    assert store.state("dataset", "ingest", recipe_of("ingest")) == "absent"
    with pytest.raises(ConfigError, match="Choose another --output"):
        make(store, "dataset", "ingest")
    assert folder_names(tmp_path / "out") == before


def test_a_damaged_manifest_is_skipped_and_told_and_hides_nothing(store: ArtifactStore):
    broken, good = make(store, "dataset", "ingest"), make(store, "dataset", "other")
    (broken.path / MANIFEST).write_text('{"format": 1,')
    told: list[InputError] = []

    assert list(store.artifacts(on_broken=told.append)) == [good]
    assert str(broken.path / MANIFEST) in str(told[0])
    assert store.find(good.fingerprint[:8]) == good
    assert store.state("dataset", "ingest", recipe_of("ingest")) == "corrupt"
    assert make(store, "dataset", "ingest") is not None


@pytest.mark.parametrize("text", ["[]", "3", "null", "", "\x00", "[" * 100_000, '{"format": 99}', '{"format": 1}'])
def test_a_text_that_is_no_manifest_is_refused_with_its_path(tmp_path: Path, text: str):
    (tmp_path / MANIFEST).write_text(text)

    with pytest.raises(InputError, match=MANIFEST):
        read_artifact(tmp_path)


def test_find_takes_path_manifest_name_kind_and_prefix(store: ArtifactStore):
    made = make(store, "dataset", "ingest", label="pile")
    names = [
        str(made.path),
        f"{made.path}/",
        str(made.path / MANIFEST),
        made.name,
        f"dataset/{made.name}",
        made.fingerprint,
        made.fingerprint[:4],
        made.fingerprint[:20].upper(),
    ]

    assert [store.find(name) for name in names] == [made] * len(names)


@pytest.mark.parametrize(
    "reference", ["", " ", "abc", "nothing", "../..", "~nobody-here/x", "a\0b", "x" * 5000, "dataset/", "*", "g" * 12]
)
def test_find_refuses_what_names_nothing(store: ArtifactStore, reference: str):
    make(store, "dataset", "ingest")

    with pytest.raises((ConfigError, InputError)):
        store.find(reference)


@pytest.mark.parametrize(
    "change",
    [
        {"files": [{"path": "../../secret", "size_bytes": 1, "sha256": "0" * 64}]},
        {"files": [{"path": "/etc/passwd", "size_bytes": 1, "sha256": "0" * 64}]},
        {"files": [{"path": 7, "size_bytes": 1, "sha256": "0" * 64}]},
        {"files": [{"path": "a", "size_bytes": "1", "sha256": "0" * 64}]},
        {"fingerprint": 5},
        {"label": "../up"},
        {"kind": ["dataset"]},
        {"summary": None},
        {"inputs": {"x": {"fingerprint": "0", "kind": "dataset", "path": "p", "content": "0"}}},
    ],
)
def test_a_strangers_manifest_with_wrong_values_or_paths_outside_is_refused(store: ArtifactStore, change: dict):
    path = make(store, "dataset", "ingest").path
    data = json.loads((path / MANIFEST).read_text()) | change
    del data["sha256"]  # a stranger's digest would fit
    (path / MANIFEST).write_text(json.dumps(data))

    with pytest.raises(InputError, match=f"{MANIFEST}: not a Shardline manifest"):
        read_artifact(path)


def test_every_flipped_bit_of_a_manifest_is_seen_or_changes_no_value(store: ArtifactStore):
    made = make(store, "dataset", "ingest")
    good = (made.path / MANIFEST).read_bytes()
    for place in range(0, len(good), 7):
        damaged = bytearray(good)
        damaged[place] ^= 1 << (place % 7)
        (made.path / MANIFEST).write_bytes(damaged)
        try:
            assert read_artifact(made.path).manifest == made.manifest
        except InputError as error:
            assert MANIFEST in str(error)


def test_find_names_all_that_answer_to_a_short_prefix(store: ArtifactStore):
    made = [make(store, "dataset", f"stage-{n}") for n in range(2)]
    first = made[0].fingerprint
    renamed = made[1].path.with_name(f"twin-{first[:12]}")
    made[1].path.rename(renamed)
    (renamed / MANIFEST).write_text(replace(made[1].manifest, fingerprint=first).to_json())

    with pytest.raises(ConfigError, match="fits several artifacts"):
        store.find(first[:8])


def test_labels_are_made_safe_for_a_file_name(store: ArtifactStore):
    made = make(store, "dataset", "ingest", label="../../etc/größe " + "x" * 500)

    assert made.path.parent == store.root / "dataset"
    assert len(made.path.name) < 130


def test_numbers_without_a_place_in_json_are_recorded_as_text(store: ArtifactStore):
    made = make(store, "checkpoint", "train", summary={"loss": float("nan"), "path": Path("x")})

    assert read_artifact(made.path).summary == {"loss": "nan", "path": "x"}


def test_running_builds_are_listed_with_holder_and_progress(store: ArtifactStore):
    seen = []

    def work(workspace: Workspace) -> dict:
        workspace.progress.update(3, total=10, unit="steps", loss_nats=2.5)
        seen.extend(store.builds())
        return {}

    store.make("checkpoint", "gpt", recipe_of(), work)

    assert seen[0].holder.pid == os.getpid()
    assert (seen[0].progress["done"], seen[0].progress["numbers"]) == (3, {"loss_nats": 2.5})
    assert list(store.builds()) == []


def test_one_artifact_among_many_is_found_without_reading_the_others(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
):
    made = make(store, "dataset", "ingest")
    for n in range(50):
        fingerprint = recipe_of(n=n).fingerprint
        path = store.root / "dataset" / f"pile-{fingerprint[:12]}"
        path.mkdir()
        (path / MANIFEST).write_text(replace(made.manifest, fingerprint=fingerprint).to_json())
    read: list[Path] = []
    monkeypatch.setattr("contracts.store.read_artifact", lambda path: read.append(path) or read_artifact(path))

    assert store.find(fingerprint[:12]).fingerprint == fingerprint
    assert len(read) == 1
    assert len(list(store.artifacts())) == 51


@pytest.mark.parametrize(
    "failure", [RuntimeError("unexpected pos 704 vs 598"), OSError("16500 requested and 992 written")]
)
def test_a_full_disk_is_told_also_when_a_library_hides_it(
    store: ArtifactStore, failure: Exception, monkeypatch: pytest.MonkeyPatch
):
    def refuse(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def work(workspace: Workspace) -> dict[str, object]:
        monkeypatch.setattr(Path, "write_bytes", refuse)
        raise failure

    with pytest.raises(ShardlineError, match="No space left on device"):
        store.make("dataset", "x", recipe_of(), work)


def test_a_defect_stays_a_defect_where_the_disk_has_room(store: ArtifactStore):
    def work(workspace: Workspace) -> dict[str, object]:
        raise RuntimeError("unexpected pos 704 vs 598")

    with pytest.raises(RuntimeError, match="unexpected pos"):
        store.make("dataset", "x", recipe_of(), work)
