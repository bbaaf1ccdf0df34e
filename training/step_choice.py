"""Chooses the step folder of a native checkpoint; light: no torch."""

from pathlib import Path

from contracts.errors import ConfigError, InputError
from training.step_folders import find_latest, list_checkpoints, read_info, resolve_step_folder


def native_step_folder(path: Path, step: int | None) -> tuple[Path, list[str]]:
    """Choose a step folder.

    Returns:
        The folder, and a warning for each newer one that was passed over.

    Raises:
        ConfigError: There is none of that step.
        InputError: The one that was asked for is damaged.
    """
    listed = list_checkpoints(path)
    if not listed:  # a step folder itself, whatever its name
        folder = resolve_step_folder(path)
        found = read_info(folder).step
        if step not in (None, found):
            raise ConfigError(f"step is {step}, and {path} is the checkpoint of step {found}. Leave step out.")
        return folder, []
    if step is None:
        latest, warnings = find_latest(path)
        return (latest.path if latest else path), warnings
    by_step = {item.step: item for item in listed}
    if step not in by_step:
        raise ConfigError(f"step is {step}, and {path} has {', '.join(map(str, sorted(by_step)))}.")
    if (problem := by_step[step].problem) is not None:
        raise InputError(f"{by_step[step].path}: {problem}.")
    return by_step[step].path, []
