"""Where the tokenizer of a checkpoint is looked for."""

from pathlib import Path

from training.tokenizer_folder import copy_tokenizer, tokenizer_folder


def test_a_run_and_its_step_folders_share_a_tokenizer_and_a_neighbour_gets_none(tmp_path: Path) -> None:
    for name in ("run/step-00000001", "run/tokenizer", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").touch()
    (tmp_path / "tokenizer.json").touch()

    assert tokenizer_folder(tmp_path / "run") == tmp_path / "run" / "tokenizer"
    assert tokenizer_folder(tmp_path / "run" / "step-00000001") == tmp_path / "run" / "tokenizer"
    assert tokenizer_folder(tmp_path / "other") is None  # the file beside it belongs to something else


def test_a_foreign_model_folder_carries_its_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")

    assert tokenizer_folder(tmp_path) == tmp_path
    copy_tokenizer({"tokenizer.model": tmp_path / "tokenizer.model"}, tmp_path / "a" / "copy")
    assert [file.name for file in (tmp_path / "a" / "copy").iterdir()] == ["tokenizer.model"]
