"""Where the tokenizer of a checkpoint lies, and its copy; light: no torch."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from training.step_folders import is_step_folder_name

TOKENIZER = "tokenizer"  # the folder in a run
_ANY_OF = ("tokenizer.json", "tokenizer.model")


def tokenizer_folder(checkpoint: Path) -> Path | None:
    """Return the folder with the tokenizer that a checkpoint carries, or None.

    Args:
        checkpoint: A run or artifact (`tokenizer/` in it), a foreign model folder (itself), or a
            step folder, which shares the tokenizer of its run.
    """
    places = [checkpoint / TOKENIZER, checkpoint]
    if is_step_folder_name(checkpoint.name):
        places += [checkpoint.parent / TOKENIZER, checkpoint.parent]
    for folder in places:
        if any((folder / name).is_file() for name in _ANY_OF):
            return folder
    return None


def copy_tokenizer(files: Mapping[str, Path], target: Path) -> None:
    """Copy files by name to `target`, made if need be; each appears whole."""
    target.mkdir(parents=True, exist_ok=True)
    for name, source in files.items():
        unfinished = target / f"{name}.tmp"
        shutil.copyfile(source, unfinished)
        unfinished.replace(target / name)
