"""A number is measured only on the weights that the manifest names."""

from pathlib import Path

import pytest
from models import tiny_model, write_model

from contracts.errors import InputError
from evaluation.checkpoint import step_folder_of


def test_weights_that_were_changed_are_refused_by_file(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tiny_model())
    assert step_folder_of(tmp_path / "model", None) == folder
    data = next(folder.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    for step in (None, 3):
        with pytest.raises(InputError, match=rf"{data.name} is damaged"):
            step_folder_of(tmp_path / "model", step)
