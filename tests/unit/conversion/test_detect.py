"""Formats are told by what lies in a folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conversion_cases import random_model, write_random

from conversion.detect import format_of

CASES = Path(__file__).parents[2] / "cases"


def test_a_native_checkpoint_is_known_by_its_folder_and_by_its_step_folder(tmp_path):
    folder = write_random(tmp_path / "run", random_model("gpt2"), has_optimizer=False)

    assert format_of(folder) == format_of(folder.parent) == "native"


@pytest.mark.parametrize(
    ("path", "expected"),
    [("huggingface/gpt2", "huggingface"), ("TRN-31/legacy", "megatron"), ("TRN-31/dcp", "dcp"), ("_tokenizers", None)],
)
def test_foreign_formats_are_known(path, expected):
    assert format_of(CASES / path) == expected


def test_files_and_missing_paths_are_no_checkpoint(tmp_path):
    (tmp_path / "file").write_text("x")

    assert format_of(tmp_path / "file") is None
    assert format_of(tmp_path / "nothing") is None
    assert format_of(tmp_path) is None


def test_detection_and_the_stage_import_no_torch():
    code = "import sys, conversion.detect, conversion.stage; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=False).returncode == 0
