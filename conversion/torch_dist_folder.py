"""The files of a Megatron-Core `torch_dist` checkpoint."""

from pathlib import Path

from contracts.errors import InputError
from conversion.huggingface_files import read_json
from conversion.megatron_folder import iteration_folder

COMMON, COMPLETE, METADATA = "common.pt", "metadata.json", ".metadata"


def torch_dist_folder(path: Path, step: int | None) -> Path:
    """Choose the folder of one iteration, and make sure that its save finished.

    Args:
        path: It, or the folder of several that Megatron's `--save` names.
        step: Which of several; None takes the one that the tracker names.

    Raises:
        ConfigError: There is none of that step.
        InputError: It is not whole, or of another kind.
    """
    names = (COMPLETE, COMMON, METADATA)
    folder = path if any((path / name).is_file() for name in names) else iteration_folder(path, step)
    if not (folder / COMPLETE).is_file():
        raise InputError(
            f"{folder}: has no {COMPLETE}, which Megatron-Core writes last: its save did not finish. Use an earlier "
            "iteration."
        )
    kind = read_json(folder / COMPLETE).get("sharded_backend")
    if kind != "torch_dist":
        raise InputError(
            f"{folder / COMPLETE}: sharded_backend is {kind!r}; readable is torch_dist. Megatron-LM converts with "
            "--ckpt-convert-format torch_dist."
        )
    for name in (METADATA, COMMON):
        if not (folder / name).is_file():
            raise InputError(f"{folder / name} is missing. Restore the checkpoint.")
    return folder


def torch_dist_files(path: Path, step: int | None) -> dict[str, Path]:
    """Name the files of an iteration, for the digests of a stage that is given them by path."""
    folder = torch_dist_folder(path, step)
    files = [folder / name for name in (COMPLETE, COMMON, METADATA)]
    return {file.name: file for file in [*files, *sorted(folder.glob("*.distcp"))]}
