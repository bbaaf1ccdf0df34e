"""Finds what an evaluation needs in a checkpoint: the step, and the tokenizer that belongs to it."""

from pathlib import Path

from contracts.errors import ConfigError, InputError
from preprocessing.tokenization.loading import load_tokenizer
from preprocessing.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer
from training.step_folders import find_latest, list_checkpoints, native_problem, resolve_step_folder
from training.tokenizer_folder import tokenizer_folder


def step_folder_of(checkpoint: Path, step: int | None) -> Path:
    """Return the step folder to measure.

    Args:
        checkpoint: Folder of an artifact or run, or a step folder itself.
        step: Empty takes the newest good one.

    Raises:
        InputError: There is no such step, or it is damaged; names it and why. Every file is compared
            with its digest, so that no number is measured on other weights than the manifest names.
    """
    folder = _chosen(checkpoint, step)
    if (problem := native_problem(folder, digests=True)) is not None:
        raise InputError(f"{folder}: {problem}. Restore it, or measure another step.")
    return folder


def _chosen(checkpoint: Path, step: int | None) -> Path:
    if step is None:
        return resolve_step_folder(checkpoint)
    found = {item.step: item for item in list_checkpoints(checkpoint)}
    if step not in found:
        known = ", ".join(str(number) for number in sorted(found)) or "none"
        raise InputError(f"{checkpoint}: has no checkpoint of step {step}. Steps there: {known}.")
    if (problem := found[step].problem) is not None:
        newest, _ = find_latest(checkpoint)
        cure = f" Step {newest.step} is whole." if newest is not None else ""
        raise InputError(f"{found[step].path}: {problem}.{cure}")
    return found[step].path


def tokenizer_path_of(checkpoint: Path) -> Path | None:
    """Return the folder with the tokenizer that a checkpoint carries, if it is one that can be loaded; else None."""
    folder = tokenizer_folder(checkpoint)
    return folder if folder is not None and (folder / TOKENIZER_FILE).is_file() else None


def tokenizer_of(checkpoint: Path) -> Tokenizer:
    """Load the tokenizer that a checkpoint carries.

    Raises:
        ConfigError: It carries none.
    """
    path = tokenizer_path_of(checkpoint)
    if path is None:
        raise ConfigError(
            f"{checkpoint} carries no tokenizer; copy its tokenizer.json into {checkpoint / 'tokenizer'}."
        )
    return load_tokenizer(path)
