"""The reshape stage under its two kinds: a native checkpoint, or an exported model. Light: no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.artifact import Artifact
from contracts.errors import ConfigError
from contracts.files import user_path
from contracts.stage import Stage
from contracts.store import Workspace
from conversion.config import ReshapeConfig
from conversion.detect import format_of
from conversion.huggingface_files import CONFIG, INDEX, weight_files
from conversion.tokenizer_files import tokenizer_files
from training.step_choice import native_step_folder


def _reshape(settings: ReshapeConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    from conversion.reshape import reshape

    return reshape(settings, inputs, workspace)


def _raw_files(settings: ReshapeConfig) -> dict[str, Path]:
    """The files of a source that is given by path.

    The manifest of a native step folder holds the digests of all its files, so it stands for them;
    the stage compares them before it writes.
    """
    files = {} if settings.checkpoint is None else _files_of(settings.checkpoint, settings.step, "checkpoint")
    for number, path in enumerate(settings.average):
        files |= {f"average{number}/{name}": file for name, file in _files_of(path, None, "average").items()}
    return files


def _files_of(text: str, step: int | None, setting: str) -> dict[str, Path]:
    path = user_path(text)
    kind = format_of(path)
    if kind is None:
        raise ConfigError(f"reshape.{setting} is {path}, which holds no checkpoint.")
    files: dict[str, Path] = {}
    if kind == "native":
        folder, _ = native_step_folder(path, step)
        files["manifest.json"] = folder / "manifest.json"
        path = folder
    elif kind == "huggingface":
        paths = [path / CONFIG, path / INDEX, *weight_files(path)]
        files |= {file.name: file for file in paths if file.is_file()}
    elif kind == "megatron":
        from conversion.megatron_folder import rank_files

        files |= rank_files(path, step)
    elif kind == "mcore_dist":
        from conversion.torch_dist_folder import torch_dist_files

        files |= torch_dist_files(path, step)
    elif kind == "dcp":
        from conversion.dcp import dcp_files

        files |= dcp_files(path, step)
    return files | {f"tokenizer/{name}": file for name, file in tokenizer_files(path).items()}


RESHAPE = Stage(
    name="reshape", version=1, kind="checkpoint", settings=ReshapeConfig, work=_reshape, raw_files=_raw_files
)
EXPORT = Stage(name="reshape", version=1, kind="model", settings=ReshapeConfig, work=_reshape, raw_files=_raw_files)


def stage_for(settings: ReshapeConfig) -> Stage[ReshapeConfig]:
    """Return the stage whose artifact has the kind that `settings.to` makes."""
    return EXPORT if settings.to == "huggingface" else RESHAPE
