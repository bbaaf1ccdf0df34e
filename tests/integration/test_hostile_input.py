"""Files and words made to do harm: refused by name, with a message that is safe to print and no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import shardline

ROOT = Path(__file__).parents[2]
TOKENIZER = Path(__file__).parents[1] / "cases" / "_tokenizers" / "byte257"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _assert_refused(capsys: pytest.CaptureFixture[str], *words: object, code: int, says: str) -> None:
    outcome = shardline(capsys, *words)

    assert outcome.code == code, outcome.err
    assert says in outcome.err
    assert "defect" not in outcome.err
    assert "Traceback" not in outcome.err


def test_keys_of_a_record_reach_the_terminal_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    Path("keys.jsonl").write_text('{"\\u001b[31m": 1, "\\ud800": 2}\n')

    _assert_refused(
        capsys, "ingest", "--source", "keys.jsonl", "--tokenizer", TOKENIZER, code=1, says="keys present: \\x1b[31m"
    )


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["inspect", "x" * 300], 2, "is no folder with an artifact"),
        (["inspect", "~nobody at all/x"], 2, "is no folder with an artifact"),
        (["inspect", os.fsdecode(b"\xff")], 1, "not valid UTF-8"),
        (["ingest", "--source", "x" * 300, "--tokenizer", str(TOKENIZER)], 1, "File name too long"),
        (["plan", "~nobody at all/x.yaml"], 2, "cannot be read"),
    ],
)
def test_words_that_can_name_nothing(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str
) -> None:
    _assert_refused(capsys, *words, code=code, says=says)


def test_damaged_records_are_never_training_text_of_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    Path("damaged.jsonl.gz").write_text("not gzip, and no JSON\n" * 9)

    _assert_refused(
        capsys,
        "tokenizer",
        "--source",
        "damaged.jsonl.gz",
        "--vocab-size",
        270,
        code=1,
        says="damaged.jsonl.gz, line 1",
    )


def test_a_reader_that_goes_away_ends_the_command_without_a_word() -> None:
    command = [sys.executable, "-m", "flows.cli", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (141, b"")


def test_verify_looks_at_the_recipe_and_at_folders_without_a_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_text(json.dumps({"text": "some text"}) + "\n")
    shardline(capsys, "ingest", "--source", "a.jsonl", "--tokenizer", TOKENIZER, "--output", "out")
    recipe = Path("out/recipe.json")
    good = recipe.read_text()

    recipe.write_text(good.replace("1", "2", 1))
    outcome = shardline(capsys, "verify", "out")
    assert outcome.code == 1
    assert "recipe.json: missing, or not the recipe of the manifest" in outcome.out

    recipe.write_text(good)
    assert shardline(capsys, "verify", "out").code == 0
    Path("out/manifest.json").unlink()
    outcome = shardline(capsys, "verify", "out")
    assert outcome.code == 1
    assert "out is unfinished" in outcome.out
