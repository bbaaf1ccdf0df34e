"""Checks, before a process starts, that a run can begin with a checkpoint. Never imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from contracts.artifact import MANIFEST, Artifact, read_artifact
from contracts.errors import ConfigError, ShardlineError
from contracts.files import user_path
from contracts.json_text import parse_json
from contracts.store import ArtifactStore
from training.config import PretrainConfig
from training.model_config import ModelConfig
from training.parameters import stored_parameters
from training.step_choice import native_step_folder
from training.step_folders import CheckpointInfo, read_info
from training.tokenizer_folder import tokenizer_folder

INITIAL = "initial"  # name of the input


@dataclass(frozen=True)
class Initial:
    """A checkpoint that a run begins with.

    Args:
        folder: Its step folder.
        info: The manifest.
    """

    folder: Path
    info: CheckpointInfo

    @property
    def run(self) -> Artifact | None:
        """The run that wrote it, if it still lies in its artifact."""
        parent = self.folder.parent
        return read_artifact(parent) if (parent / MANIFEST).is_file() else None


def find_initial(settings: PretrainConfig, inputs: Mapping[str, Artifact]) -> Initial | None:
    """Choose the step folder that the settings name; None where a run begins with random weights.

    Raises:
        ConfigError: Both an artifact and a path are given, or there is no such step.
        InputError: It is damaged, or no native checkpoint.
    """
    wanted = settings.initial
    if INITIAL in inputs and wanted.checkpoint:
        raise ConfigError("pretrain: both an initial artifact and pretrain.initial.checkpoint are given. Keep one.")
    path = inputs[INITIAL].path if INITIAL in inputs else user_path(wanted.checkpoint) if wanted.checkpoint else None
    if path is None:
        if wanted.optimizer or wanted.averaged or wanted.step is not None:
            raise ConfigError("pretrain.initial says what to take of a checkpoint, and names none. Give --from.")
        return None
    folder, _ = native_step_folder(path, wanted.step)
    return Initial(folder, read_info(folder))


def check_initial(settings: PretrainConfig, initial: Initial, datasets: list[Artifact]) -> None:
    """Make sure that model, tokenizer and batches of a run fit what it begins with.

    Args:
        settings: With the vocabulary size.

    Raises:
        ConfigError: They do not.
    """
    _check_model(settings.model, initial)
    source = tokenizer_folder(datasets[0].path) if datasets else None
    known = tokenizer_folder(initial.folder)
    if source is not None and known is not None and _definition(source) != _definition(known):
        raise ConfigError(
            f"{initial.folder} was trained with another tokenizer than that of {datasets[0].path}: their "
            f"tokenizer.json differ, so their ids do not mean the same. Ingest the data with --tokenizer {known}."
        )
    if settings.initial.optimizer and not initial.info.has_optimizer:
        raise ConfigError(f"{initial.folder} holds no optimizer state. Leave out initial.optimizer.")
    if not settings.initial.position:
        return
    step, consumed = initial.info.step, initial.info.consumed_samples
    if step >= settings.train_steps:
        raise ConfigError(
            f"initial.position goes on at step {step}, and train_steps is {settings.train_steps}. Set train_steps "
            f"above {step}; it counts from the start of the first run."
        )
    if settings.samples_after(step) != consumed:
        raise ConfigError(
            f"{initial.folder} has used {consumed} rows in {step} steps, and global_batch_size "
            f"({settings.global_batch_size}) gives {settings.samples_after(step)}. Use the batch of the run that "
            "wrote it."
        )


def check_same_data(settings: PretrainConfig, initial: Initial, index: Artifact, store: ArtifactStore) -> str | None:
    """Make sure that a run that goes on in mid-course reads on where the one before stopped.

    Returns:
        What differs, where the settings accept it; None where nothing does.

    Raises:
        ConfigError: The data are others, and the settings do not accept it.
    """
    if not settings.initial.position:
        return None
    difference = _difference(settings, initial, index, store)
    if difference is None or settings.initial.other_data:
        return difference
    raise ConfigError(
        f"initial.position: {difference}. Give the data, seed, split and phases of that run, or accept that samples "
        "may come again or be left out with initial.other_data: true."
    )


def other_schedule(settings: PretrainConfig, initial: Initial) -> str | None:
    """Say whether a run that goes on in mid-course has another schedule than the one before; None if it has not."""
    run = initial.run
    if not settings.initial.position or run is None:
        return None
    before, now = PretrainConfig.model_validate(run.manifest.config).schedule, settings.schedule
    at = before.position(initial.info.step, initial.info.consumed_samples)
    was, is_now = before.learning_rate(at), now.learning_rate(at)
    if was == is_now and before.decay_end == now.decay_end:
        return None
    return (
        f"the learning rate of step {initial.info.step} was {was:g}, and this run's schedule gives {is_now:g} there "
        f"(it ends at {now.decay_end}, and the one before at {before.decay_end}). To go on as one run, set "
        "optimizer.decay_steps to the same number in both"
    )


def _difference(settings: PretrainConfig, initial: Initial, index: Artifact, store: ArtifactStore) -> str | None:
    from preprocessing.samples.prefix import first_difference

    run = initial.run
    if run is None or "index_fingerprint" not in run.summary:
        return f"{initial.folder} lies in no run of its own any more, so nothing says which samples it has read"
    before, after = PretrainConfig.model_validate(run.manifest.config).curriculum, settings.curriculum
    rows = initial.info.consumed_samples
    step = settings.global_batch_size
    if any(before.place(row) != after.place(row) for row in [*range(0, rows, step), rows - 1]):
        return f"the phases of {run.path} up to its step {initial.info.step} are not those of this run"
    was, now = str(run.summary["index_fingerprint"]), index.fingerprint
    if was == now:
        return None
    try:
        old = store.find(was)
    except ShardlineError:
        return f"{run.path} read its samples through the index {was[:12]}, which is no longer in {store.root}"
    count = max(before.place(row)[0] for row in range(max(0, rows - step), rows)) + 1
    place = first_difference(old.path, index.path, count)
    if place is None:
        return None
    return (
        f"the data are not those that {run.path} has read: its index {was[:12]} and this run's, {now[:12]}, differ "
        f"from sample {place} of the {count} that it has used"
    )


def _check_model(model: ModelConfig, initial: Initial) -> None:
    wanted = {name: tuple(shape) for name, (shape, _) in stored_parameters(model).items()}
    found = {name: tuple(shape) for name, shape in initial.info.parameters.items()}
    if wanted != found:
        names = sorted(wanted.keys() ^ found.keys()) or [name for name in wanted if wanted[name] != found[name]]
        raise ConfigError(
            f"{initial.folder} holds another model: {names[0]} is {_shape(found, names[0])} there and "
            f"{_shape(wanted, names[0])} in the settings. Leave the model's settings out to take those of the "
            "checkpoint."
        )
    free = {"dropout", "backend", "max_position_embeddings", "rope_scaling", "rotary_base", "sliding_window", "moe"}
    stored = ModelConfig.model_validate(initial.info.model)
    for name in sorted(type(model).model_fields.keys() - free):
        if getattr(model, name) != getattr(stored, name):
            raise ConfigError(
                f"{initial.folder} was trained with model.{name}: {getattr(stored, name)}, and the settings have "
                f"{getattr(model, name)}. Leave it out to take that of the checkpoint."
            )


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return " x ".join(map(str, shapes[name])) if name in shapes else "absent"


def _definition(folder: Path) -> object:
    path = folder / "tokenizer.json"
    return parse_json(path.read_text(encoding="utf-8")) if path.is_file() else (folder / "tokenizer.model").read_bytes()
