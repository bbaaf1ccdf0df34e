"""What is built with --output is seen by the store it is built beside."""

from pathlib import Path

from small_artifacts import SAMPLE, SampleSettings

from contracts.lineage import descendants
from contracts.outputs import OUTPUTS, outputs_of
from contracts.store import ArtifactStore


def test_an_output_folder_is_listed_found_and_followed(tmp_path: Path) -> None:
    root = tmp_path / "store"
    first = SAMPLE.run(SampleSettings(), store=ArtifactStore(root, output=tmp_path / "first"))
    second = SAMPLE.run(SampleSettings(), inputs={"a": first}, store=ArtifactStore(root, output=tmp_path / "second"))

    store = ArtifactStore(root)

    assert [item.path for item in store.artifacts()] == [first.path, second.path]
    assert store.find(second.fingerprint[:8]).path == second.path
    assert [relative.item for relative in descendants(store, first)] == [second]


def test_an_output_folder_is_remembered_once_and_forgotten_when_it_is_gone(tmp_path: Path) -> None:
    root, output = tmp_path / "store", tmp_path / "out"
    for _ in range(2):
        SAMPLE.run(SampleSettings(), store=ArtifactStore(root, output=output), force=True)
    assert len(outputs_of(root)) == 1

    output.rename(tmp_path / "moved")

    assert outputs_of(root) == []


def test_a_damaged_line_hides_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "store"
    SAMPLE.run(SampleSettings(), store=ArtifactStore(root, output=tmp_path / "out"))
    with (root / OUTPUTS).open("ab") as file:
        file.write(b'\xff\xfe{"kind": 3\n')

    assert len(outputs_of(root)) == 1
