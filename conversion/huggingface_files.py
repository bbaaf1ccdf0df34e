"""The files of a Hugging Face model folder; light: no torch."""

from pathlib import Path, PurePosixPath
from typing import Any

from contracts.errors import InputError
from contracts.json_text import parse_json

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """List the files that hold the weights; the index is checked, the files are not opened.

    Raises:
        InputError: The index is damaged or leads out of the folder, or there are no safetensors files.
    """
    if (folder / INDEX).is_file():
        return sorted({folder / name for name in weight_map(folder).values()})
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.h5")) or any(folder.glob("*.msgpack")):
        raise InputError(
            f"{folder}: holds weights in another form than safetensors. Save it anew with "
            "save_pretrained(..., safe_serialization=True) of transformers."
        )
    raise InputError(f"{folder}: there is neither {SINGLE} nor {INDEX}; the weights are missing.")


def weight_map(folder: Path) -> dict[str, str]:
    """Read the index: tensor name to file name.

    Raises:
        InputError: It is damaged, or a file name in it is a path.
    """
    path = folder / INDEX
    found = read_json(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise InputError(f"{path}: holds no weight_map.")
    for tensor, name in found.items():
        if not isinstance(name, str) or PurePosixPath(name).name != name or "\\" in name or name in ("", "..", "."):
            raise InputError(
                f"{path}: places tensor {tensor} in {name!r}, which is no plain file name; a file outside of the "
                "folder is never read."
            )
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        InputError: The file is missing or holds something else.
    """
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise InputError(f"{path}: is no JSON ({error}).") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds no JSON object.")
    return data
