"""Native sharded checkpoints: saved by all ranks, readable at any other layout.

`step-00000100/` holds the files of `torch.distributed.checkpoint` (tensors only, no pickled
objects) under canonical names, with the optimizer under `optim.<name>.exp_avg` and
`optim.<name>.exp_avg_sq`, and a `manifest.json` that is written last. The folder gets its name in
one step, after all bytes are on the disk.
"""

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from contracts.errors import InputError, ShardlineError
from training.checkpoint_files import Planner, Writer
from training.checkpoint_files import SafeReader as SafeReader
from training.config import InitialConfig, ModelConfig, Precision, PretrainConfig
from training.dtensors import as_dtensors
from training.file_digests import SHA256
from training.gradients import LocalParameter, local_parameters
from training.mesh import Mesh
from training.model import TransformerStage
from training.optimizer import LocalOptimizer
from training.optimizer_state import EMA, STATE_KEY, described
from training.parameters import OPTIMIZER_PREFIX, stored_parameters
from training.safe_pickle import read_dcp_metadata
from training.saving import Save, agree, reason_of
from training.saving import prune as prune
from training.saving import publish as publish
from training.step_folders import (
    TOKENS_KEY,
    CheckpointInfo,
    list_checkpoints,
    read_info,
    step_folder_name,
)
from training.trainer import Trainer, build_stages

TRAINER_KEY = "trainer"  # in a manifest's `extra`: what of a trainer's state is no tensor


def state_tensors(
    parameters: list[LocalParameter], mesh: Mesh, optimizer: LocalOptimizer | None = None
) -> dict[str, Tensor]:
    """Name every tensor that this rank holds a part of; the views share memory with the model.

    Returns:
        Stored name to DTensor over the axes (dp, tp).
    """
    tensors: dict[str, Tensor] = {}
    for index, parameter in enumerate(parameters):
        tensors.update(as_dtensors(parameter.value, parameter, mesh))
        for moment, value in optimizer.moments(index).items() if optimizer else ():
            for name, tensor in as_dtensors(value, parameter, mesh).items():
                tensors[f"{OPTIMIZER_PREFIX}{name}.{moment}"] = tensor
    return tensors


def spread_copies(parameters: list[LocalParameter], optimizer: LocalOptimizer | None = None) -> None:
    """Give every copy of a parameter on this rank the values that were put into the one that `state_tensors` names.

    Stages of a rank may each hold a copy (training/tied.py); its tensor has one name, which the last of them bears.
    """
    named = {parameter.spec.canonical_name: index for index, parameter in enumerate(parameters)}
    for index, parameter in enumerate(parameters):
        source = named[parameter.spec.canonical_name]
        if source == index:
            continue
        parameter.value.copy_(parameters[source].value)
        if optimizer is not None:
            filled = optimizer.moments(source)
            for moment, value in optimizer.moments(index).items():
                value.copy_(filled[moment])


def save_checkpoint(trainer: Trainer, root: Path, *, keep_last: int) -> Path:
    """Write the run's state as a new step folder under `root`; every rank calls it.

    Older checkpoints beyond `keep_last` are removed once the new one is whole.

    Raises:
        ShardlineError: The disk refused; the older checkpoints are untouched.
    """
    folder = root / step_folder_name(trainer.step)
    tensors = state_tensors(trainer.parameters, trainer.mesh, trainer.optimizer)
    save = Save(agree(tensors), folder, checkpoint_info(trainer))
    save.prepare()
    save.write()
    if (reason := save.settle()) is not None:
        raise save_error(trainer.step, root, reason)
    if dist.get_rank() == 0:
        prune(root, keep_last)
    dist.barrier()
    return folder


def save_error(step: int, root: Path, reason: str) -> ShardlineError:
    """Say that a checkpoint could not be written, and what to do."""
    return ShardlineError(
        f"Step {step}: the checkpoint could not be written under {root} ({reason}). When there is room and the disk "
        "answers, the same command goes on from the last whole checkpoint."
    )


def checkpoint_info(trainer: Trainer) -> CheckpointInfo:
    """Describe a run's state as it is now, for the manifest."""
    config = trainer.config
    return CheckpointInfo(
        step=trainer.step,
        consumed_samples=trainer.consumed_samples,
        seq_length=config.seq_length,
        model=config.model.model_dump(mode="json"),
        layout=config.layout.model_dump(mode="json"),
        has_optimizer=True,
        parameters={name: shape for name, (shape, _) in stored_parameters(config.model).items()},
        dtype=str(trainer.parameters[0].value.dtype).removeprefix("torch."),
        extra={"seed": config.seed, "precision": config.precision, **_more_facts(trainer)},
    )


def _more_facts(trainer: Trainer) -> dict[str, Any]:
    optimizer, state = trainer.config.optimizer, trainer.extra_state()
    facts = described(optimizer.kind, has_ema=optimizer.ema_decay is not None)
    if trainer.config.phases:
        facts[TOKENS_KEY] = trainer.config.curriculum.tokens_after(trainer.consumed_samples)
    return facts | ({TRAINER_KEY: state} if state else {})


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], info: CheckpointInfo) -> None:
    """Write a whole native checkpoint from one process without ranks, such as an imported model.

    Args:
        folder: The step folder to make; replaced if it exists.
        tensors: Stored name to uncut tensor.
        info: Its manifest; `files` is filled in.
    """
    unfinished = folder.with_suffix(".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    writer = Writer(unfinished, SHA256)
    with _without_ranks():
        save(dict(tensors), storage_writer=writer, planner=Planner(), no_dist=True)
    publish(unfinished, folder, replace(info, files=writer.digests))


@contextmanager
def _without_ranks() -> Iterator[None]:
    """Keep torch from warning that there are no ranks, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


def load_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Put the weights, moments and position of a checkpoint of any layout into `trainer`, on every rank.

    Raises:
        InputError: It is of another model, has no optimizer state, or is damaged.
    """
    info = read_info(folder)
    if not info.has_optimizer:
        raise InputError(f"{folder}: holds no optimizer state, so a run cannot go on from it.")
    _check_same_optimizer(trainer, info, folder)
    _load(state_tensors(trainer.parameters, trainer.mesh, trainer.optimizer), folder)
    spread_copies(trainer.parameters, trainer.optimizer)
    trainer.load_extra_state(info.extra.get(TRAINER_KEY, {}), step=info.step, consumed_samples=info.consumed_samples)


def load_initial(trainer: Trainer, folder: Path, wanted: InitialConfig) -> None:
    """Begin a run with what `wanted` takes of a checkpoint of any layout, on every rank.

    Raises:
        InputError: It is of another model or optimizer, or is damaged.
    """
    if wanted.position:
        load_checkpoint(trainer, folder)
        return
    if not wanted.optimizer:
        if wanted.averaged and not has_average(read_info(folder)):
            raise InputError(f"{folder}: holds no moving average of the weights. Leave out initial.averaged.")
        load_weights(trainer.stages, trainer.mesh, folder, averaged=wanted.averaged)
        trainer.optimizer.restart_averages()
        return
    load_checkpoint(trainer, folder)
    updates = trainer.updates
    trainer.load_extra_state({}, step=0, consumed_samples=0)
    trainer.optimizer.set_step(updates)


def has_average(info: CheckpointInfo) -> bool:
    """Say whether a checkpoint holds a moving average of the weights."""
    return bool(info.extra.get(STATE_KEY, {}).get("ema"))


def roll_back(trainer: Trainer, root: Path) -> str:
    """Put weights and optimizer state of the newest checkpoint back, on every rank; the position stays.

    The samples that led to the trouble are not seen again, and the steps since the checkpoint are lost.

    Returns:
        Name of the checkpoint's folder.

    Raises:
        ShardlineError: There is no checkpoint.
    """
    name: list[str | None] = [None]
    if dist.get_rank() == 0:
        name[0] = next((item.path.name for item in list_checkpoints(root) if item.problem is None), None)
    dist.broadcast_object_list(name)
    if name[0] is None:
        raise ShardlineError(f"Step {trainer.step}: there is no checkpoint under {root} to roll back to.")
    folder = root / name[0]
    _load(state_tensors(trainer.parameters, trainer.mesh, trainer.optimizer), folder)
    spread_copies(trainer.parameters, trainer.optimizer)
    info = read_info(folder)
    trainer.updates = int(info.extra.get(TRAINER_KEY, {}).get("updates", info.step))
    trainer.optimizer.set_step(trainer.updates)
    trainer.roll_backs += 1
    return name[0]


def _check_same_optimizer(trainer: Trainer, info: CheckpointInfo, folder: Path) -> None:
    optimizer = trainer.config.optimizer
    asked = {"kind": optimizer.kind, "ema": optimizer.ema_decay is not None}
    found = {"kind": "adamw", "ema": False} | dict(info.extra.get(STATE_KEY, {}))
    for key, name in (("kind", "optimizer.kind"), ("ema", "a moving average of the weights (optimizer.ema_decay)")):
        if asked[key] != found[key]:
            raise InputError(
                f"{folder}: holds the state of another optimizer: {name} is {found[key]} there and {asked[key]} in the "
                "settings. Use the settings of the run that wrote it."
            )


def load_weights(stages: Sequence[TransformerStage], mesh: Mesh, folder: Path, *, averaged: bool = False) -> None:
    """Put the weights of a checkpoint of any layout, or their moving average, into sharded stages, on every rank.

    Raises:
        InputError: It is of another model, or is damaged.
    """
    parameters = local_parameters(stages)
    tensors = state_tensors(parameters, mesh)
    if averaged:
        tensors = {f"{OPTIMIZER_PREFIX}{name}.{EMA}": tensor for name, tensor in tensors.items()}
    _load(tensors, folder)
    spread_copies(parameters)


def load_model(
    folder: Path,
    mesh: Mesh,
    *,
    precision: Precision = "float32",
    max_length: int | None = None,
    averaged: bool = False,
) -> list[TransformerStage]:
    """Build this rank's stages of the model in a native step folder, at the mesh's layout, in eval mode.

    Args:
        precision: float32, bf16 or float64.
        max_length: Longest row that will be scored; only rotary models can go beyond their settings.
        averaged: Take the moving average of the weights instead of the weights.

    Raises:
        InputError: The checkpoint is damaged, or an average is asked for and it has none.
    """
    info = read_info(folder)
    model = ModelConfig.model_validate(info.model)
    if max_length is not None and model.position == "rope" and max_length > model.max_position_embeddings:
        model = model.model_copy(update={"max_position_embeddings": max_length})
    config = PretrainConfig.model_construct(
        model=model, layout=mesh.layout, precision=precision, recompute="none", seed=0
    )
    stages = build_stages(config, mesh, initialized=False)
    if averaged and not has_average(info):
        raise InputError(
            f"{folder}: holds no moving average of the weights. Train with optimizer.ema_decay, or measure the weights."
        )
    load_weights(stages, mesh, folder, averaged=averaged)
    return [stage.eval() for stage in stages]


def _load(tensors: dict[str, Tensor], folder: Path) -> None:
    _check_same_model(tensors, folder)
    try:
        load(tensors, storage_reader=SafeReader(folder))
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise InputError(f"{folder}: the checkpoint cannot be read ({reason_of(first)}).") from error


def _check_same_model(tensors: Mapping[str, Tensor], folder: Path) -> None:
    stored = read_dcp_metadata(folder).state_dict_metadata
    for name, tensor in tensors.items():
        entry = stored.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise InputError(f"{folder}: has no tensor {name}; it is a checkpoint of another model.")
        if tuple(entry.size) != tuple(tensor.shape):
            raise InputError(
                f"{folder}: {name} has shape {tuple(entry.size)}, and the settings ask for {tuple(tensor.shape)}. "
                "Use the settings of the run that wrote it."
            )
