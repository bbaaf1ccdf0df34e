"""Opens a checkpoint of any readable format; names what it is where it cannot be read."""

from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from contracts.errors import ConfigError, InputError
from conversion.catalogue import Checkpoint
from conversion.detect import NAMES, format_of
from training.config import ModelConfig
from training.optimizer_state import states_in
from training.parameters import OPTIMIZER_PREFIX, stored_parameters
from training.step_choice import native_step_folder
from training.step_folders import CheckpointInfo


def open_checkpoint(path: Path, step: int | None = None) -> Checkpoint:
    """Open a checkpoint; descriptions are read and checked, data is not.

    Args:
        path: A step folder, a folder of several, an artifact, a Hugging Face model folder, or a folder of Megatron-LM.
        step: Which of several; None takes the newest whole one.

    Raises:
        ConfigError: There is no checkpoint, or none of that step.
        InputError: It is damaged, or of a format or model that cannot be read.
    """
    kind = format_of(path)
    if kind is None:
        what = "does not exist" if not path.exists() else "holds no checkpoint"
        raise ConfigError(f"{path} {what}. Give a run, a step folder in it, or a Hugging Face model folder.")
    if kind == "native":
        return _open_native(path, step)
    if kind == "huggingface":
        from conversion.huggingface import open_huggingface

        found = open_huggingface(path)
        if step not in (None, found.info.step):
            raise ConfigError(f"step is {step}, and {path} holds one model, of step {found.info.step}. Leave step out.")
        return found
    if kind == "megatron":
        from conversion.megatron import open_megatron

        return open_megatron(path, step)
    if kind == "mcore_dist":
        from conversion.torch_dist import open_torch_dist

        return open_torch_dist(path, step)
    if kind == "dcp":
        from conversion.dcp import open_dcp

        return open_dcp(path, step)
    raise InputError(
        f"{path}: is a {NAMES[kind]}, which cannot be read yet. Readable are native checkpoints, Hugging Face "
        "folders, those of Megatron-LM (mp_rank_*, torch_dist) and of torch.distributed.checkpoint."
    )


def _open_native(path: Path, step: int | None) -> Checkpoint:
    from conversion.native import open_native

    folder, warnings = native_step_folder(path, step)
    found = open_native(folder)
    _check_names(folder, found)
    return replace(found, notes=tuple(warnings))


def model_of(info: CheckpointInfo, source: Path) -> ModelConfig:
    """Return the model of a checkpoint.

    Raises:
        InputError: Its settings are not valid here.
    """
    try:
        return ModelConfig.model_validate(dict(info.model))
    except ValidationError as error:
        raise InputError(f"{source}: its model settings are not valid ({error.errors()[0]['msg']}).") from error


def _check_names(folder: Path, found: Checkpoint) -> None:
    """Check that the tensors are those of the model: none missing, none of another shape."""
    expected = {name: shape for name, (shape, _) in stored_parameters(model_of(found.info, folder)).items()}
    if found.info.has_optimizer:
        expected |= {
            f"{OPTIMIZER_PREFIX}{n}.{state}": shape
            for n, shape in expected.items()
            for state in states_in(found.info.extra, n, shape)
        }
    for name, shape in expected.items():
        entry = found.tensors.entries.get(name)
        if entry is None:
            raise InputError(f"{folder}: has no tensor {name}, which its model calls for.")
        if entry.shape != shape:
            raise InputError(
                f"{folder}: tensor {name} has the shape {list(entry.shape)}, and its model calls for {list(shape)}."
            )
    unexpected = [name for name in found.tensors.entries if name not in expected]
    if unexpected:
        raise InputError(f"{folder}: tensor {unexpected[0]} has no place in its model.")
