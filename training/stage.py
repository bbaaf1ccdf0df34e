"""The stage `pretrain`: datasets in, a checkpoint artifact out. Importing it is cheap; ranks import torch.

The artifact holds step folders, `metrics.jsonl` and logs. The stage builds the sample indices
first, on the CPU, as an artifact of their own; then it starts the ranks and shows how far they are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from contracts.artifact import Artifact
from contracts.errors import ConfigError, ShardlineError
from contracts.json_text import parse_json
from contracts.stage import Stage
from contracts.store import ArtifactStore
from contracts.workspace import Workspace
from training.config import PretrainConfig, with_vocab_size
from training.file_digests import SHA256
from training.flops import parameter_count, step_flops_per_token
from training.indices import named_datasets, training_index, validation_indices
from training.initial import INITIAL, Initial, check_initial, check_same_data, find_initial, other_schedule
from training.launch import run_ranks
from training.metrics import METRICS, LastLine, read
from training.rank import Job
from training.step_folders import MANIFEST as STEP_MANIFEST
from training.step_folders import (
    StepFolder,
    clear_unfinished,
    find_latest,
    list_checkpoints,
    read_info,
    step_folder_name,
)
from training.tokenizer_folder import TOKENIZER, copy_tokenizer, tokenizer_folder

LOGS = "logs"


def pretrain(settings: PretrainConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Train the model of `settings` on the datasets; goes on where an interrupted run left a checkpoint.

    Args:
        inputs: `dataset0`, `dataset1`, ...; else `settings.datasets` names them by path. And `initial`, a checkpoint
            to begin with; else `settings.initial.checkpoint` may name one.

    Raises:
        ConfigError: The settings do not fit the datasets.
        ShardlineError: A rank failed, or the run was asked to stop before its last step.
    """
    initial = find_initial(settings, inputs)
    inputs = {name: item for name, item in inputs.items() if name != INITIAL}
    datasets = named_datasets(settings, inputs)
    settings = _with_vocabulary(settings, datasets, initial)
    if initial is not None:
        check_initial(settings, initial, datasets)
    if settings.sft is None and any(item.manifest.config.get("turns") for item in datasets):
        workspace.progress.note(
            "warning: the dataset holds conversations, and all of their tokens will give a loss, what is read as well "
            "as what is said; --sft (sft: {}) takes what is said alone"
        )
    latest = _newest_checkpoint(workspace)
    _check_batches(settings, latest)
    index = training_index(settings, inputs, workspace)
    facts = {} if initial is None else _begun_with(settings, initial, index, workspace)
    validation = validation_indices(settings, inputs, index, workspace)
    _copy_tokenizer(datasets, workspace.path, initial)
    if latest is None or latest.step < settings.train_steps:
        _train(settings, index, validation, latest, initial, workspace)
    return {**_summary(settings, index, workspace), **facts}


def _begun_with(settings: PretrainConfig, initial: Initial, index: Artifact, workspace: Workspace) -> dict[str, Any]:
    """Facts on the checkpoint that the run begins with; says what a user should know of them."""
    facts: dict[str, Any] = {"initial": {"step": initial.info.step, "folder": str(initial.folder)}}
    difference = check_same_data(settings, initial, index, ArtifactStore(workspace.store.root))
    if difference is not None:
        workspace.progress.note(f"warning: {difference}; accepted by initial.other_data")
        facts["initial"]["other_data"] = difference
    if (stretched := other_schedule(settings, initial)) is not None:
        workspace.progress.note(f"warning: {stretched}")
    taken = "weights" + (", optimizer" if settings.initial.optimizer else "")
    taken += " and position" if settings.initial.position else ""
    workspace.progress.note(f"beginning with {taken} of {initial.folder} (step {initial.info.step})")
    return facts


def _with_vocabulary(settings: PretrainConfig, datasets: list[Artifact], initial: Initial | None) -> PretrainConfig:
    sizes = {item.name: int(item.summary["vocab_size"]) for item in datasets if "vocab_size" in item.summary}
    largest = max(sizes.values(), default=None)
    if initial is not None and settings.model.vocab_size is None:
        settings = with_vocab_size(settings, int(initial.info.model["vocab_size"]))
    if settings.model.vocab_size is None and largest is None:
        raise ConfigError("model.vocab_size is not set, and the datasets do not say it. Set model.vocab_size.")
    if largest is not None and (settings.model.vocab_size or largest) < largest:
        raise ConfigError(
            f"model.vocab_size ({settings.model.vocab_size}) is below the {largest} tokens of the dataset's tokenizer. "
            f"Set it to {largest} or more, or leave it out."
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ConfigError(
            f"The datasets have vocabularies of different sizes ({listed}). Ingest them with one tokenizer."
        )
    try:
        return with_vocab_size(settings, largest or 0)
    except ValidationError as error:
        raise ConfigError("; ".join(str(item["ctx"]["error"]) for item in error.errors() if "ctx" in item)) from error


def _copy_tokenizer(datasets: list[Artifact], folder: Path, initial: Initial | None) -> None:
    """Keep the tokenizer beside the weights: scoring and export need it long after the data is gone."""
    source = tokenizer_folder(datasets[0].path) if datasets else None
    if source is None and initial is not None:
        source = tokenizer_folder(initial.folder)
    if source is not None:
        copy_tokenizer({file.name: file for file in source.iterdir() if file.is_file()}, folder / TOKENIZER)


def _newest_checkpoint(workspace: Workspace) -> StepFolder | None:
    clear_unfinished(workspace.path)
    latest, warnings = find_latest(workspace.path, digests=True)
    for warning in warnings:
        workspace.progress.note(f"warning: {warning}")
    if latest is not None:
        workspace.progress.note(f"going on from step {latest.step} ({latest.path.name})")
    return latest


def _check_batches(settings: PretrainConfig, latest: StepFolder | None) -> None:
    try:
        settings.check_batches_after(read_info(latest.path).consumed_samples if latest is not None else 0)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _train(
    settings: PretrainConfig,
    index: Artifact,
    validation: dict[str, tuple[str, str]],
    latest: StepFolder | None,
    initial: Initial | None,
    workspace: Workspace,
) -> None:
    logs = workspace.path / LOGS
    logs.mkdir(exist_ok=True)
    job = Job(
        config=settings.model_dump(mode="json"),
        output=str(workspace.path.resolve()),
        index=str(index.path.resolve()),
        resume_from=str(latest.path.resolve()) if latest else None,
        initial=str(initial.folder.resolve()) if initial else None,
        stop_file=str((logs / "stop").resolve()),
        validation=validation,
    )
    job.write(logs / "job.json")
    (logs / "result.json").unlink(missing_ok=True)
    layout = settings.layout
    workspace.progress.note(
        f"{parameter_count(settings.model):,} parameters ({settings.model.family}), {layout.world_size} ranks "
        f"({layout.axes_text}), "
        f"{settings.train_steps} steps of {settings.global_batch_size * settings.seq_length:,} tokens"
        + (f" at most, in {len(settings.phases)} phases" if len(settings.phases) > 1 else "")
    )
    follower = _Follower(settings, workspace)
    run_ranks(
        "training.rank",
        [str(logs / "job.json")],
        nproc=settings.layout.world_size,
        log_dir=logs,
        threads_per_rank=settings.threads_per_rank,
        stop_file=Path(job.stop_file),
        grace_s=settings.stop_grace_s,
        hang_timeout_s=settings.hang_timeout_s or None,
        on_poll=follower.look,
        on_note=workspace.progress.note,
    )
    done = parse_json((logs / "result.json").read_text(encoding="utf-8"))["step"]
    if done < settings.train_steps:
        raise ShardlineError(
            f"The run was asked to stop and saved step {done} of {settings.train_steps}. Run the same command to go on."
        )


class _Follower:
    """Turns new lines of the metrics file into progress."""

    def __init__(self, settings: PretrainConfig, workspace: Workspace) -> None:
        self.settings, self.workspace = settings, workspace
        self.last_line = LastLine(workspace.path / METRICS)

    def look(self) -> None:
        line = self.last_line.newest()
        if line is None:
            return
        self.workspace.progress.update(
            line["step"],
            total=self.settings.train_steps,
            unit="steps",
            **{
                name: line[key]
                for name, key in (
                    ("loss", "loss_nats"),
                    ("tokens_per_s", "tokens_per_s"),
                    ("gradient_norm", "gradient_norm"),
                )
                if key in line
            },
        )


def _summary(settings: PretrainConfig, index: Artifact, workspace: Workspace) -> dict[str, Any]:
    lines = list(read(workspace.path / METRICS))
    last = max(lines, key=lambda line: line["step"], default={})
    folder = step_folder_name(settings.train_steps)
    info = read_info(workspace.path / folder)
    for item in list_checkpoints(workspace.path):
        for name, facts in read_info(item.path).files.items():
            if SHA256 in facts:
                workspace.known_digests[f"{item.path.name}/{name}"] = facts[SHA256]
    summary: dict[str, Any] = {
        "step": info.step,
        "consumed_samples": info.consumed_samples,
        "tokens": info.consumed_tokens,
        "parameters": parameter_count(settings.model),
        "vocab_size": settings.model.vocab_size,
        "seq_length": settings.seq_length,
        "flops_per_token": step_flops_per_token(settings.model, settings.seq_length, settings.decoder_length or None),
        "model": settings.model.model_dump(mode="json"),
        "layout": settings.layout.model_dump(mode="json"),
        "index": index.path.name,
        "index_fingerprint": index.fingerprint,
        "checkpoint": folder,
    }
    kept = ("loss_nats", "tokens_per_s", "model_flops_per_s", "matmul_peak_share")
    summary |= {key: value for key, value in last.items() if key in kept or key.startswith("valid_")}
    if events := [{key: line[key] for key in ("step", "event", "reason")} for line in lines if "event" in line]:
        summary |= {"skipped_steps": last["skipped_steps"], "roll_backs": last["roll_backs"], "events": events[:100]}
    return summary


def _raw(settings: PretrainConfig) -> dict[str, str]:
    """Name artifacts given by path by their content."""
    from preprocessing.dataset.token_dataset import artifact_contents

    sets = sorted(settings.valid_sets)
    contents = artifact_contents([*settings.datasets, *(settings.valid_sets[name] for name in sets)])
    names = [f"dataset{number}" for number in range(len(settings.datasets))] + [f"valid/{name}" for name in sets]
    return {name: contents[f"dataset{n}"] for n, name in enumerate(names) if f"dataset{n}" in contents}


def _raw_files(settings: PretrainConfig) -> dict[str, Path]:
    from preprocessing.dataset.token_dataset import pair_files

    chosen = find_initial(settings, {}) if settings.initial.checkpoint else None
    initial = {"initial": chosen.folder / STEP_MANIFEST} if chosen else {}
    return initial | {
        f"{label}{name}": file
        for label, path in [
            *((f"dataset{number}", path) for number, path in enumerate(settings.datasets)),
            *((f"valid/{name}", path) for name, path in settings.valid_sets.items()),
        ]
        for name, file in pair_files(path).items()
    }


PRETRAIN = Stage(
    name="pretrain",
    version=1,
    kind="checkpoint",
    settings=PretrainConfig,
    work=pretrain,
    raw_files=_raw_files,
    raw=_raw,
)
