"""Commands that make and measure models: pretrain, reshape, evaluate, score, report."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from contracts.artifact import Artifact
from contracts.errors import ConfigError, InputError
from contracts.json_text import parse_json
from contracts.store import ArtifactStore
from flows.options import (
    ConfigOption,
    JsonOption,
    ModelOption,
    OutputOption,
    SetOption,
    StoreOption,
    TrackOption,
    settings_of,
    show,
    store_at,
)
from flows.references import artifact_at, artifact_of
from flows.single_stage import Datasets, built_on_the_way, datasets_among, holds_pairs, run_one

CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", help="Checkpoint: path, artifact name or fingerprint prefix.", metavar="PATH")
]
StepOption = Annotated[int | None, typer.Option(help="Step of the checkpoint. Default: the newest good one.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    for command in (pretrain, reshape, evaluate, score, report):
        app.command(rich_help_panel="One stage")(command)


def pretrain(
    dataset: Datasets = None,
    model: ModelOption = None,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks to start; sets layout.data_parallel so that the degrees fill them.")
    ] = None,
    initial: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Begin with the weights of this checkpoint, and with its model where no other is given. See the "
            "settings initial.* for its optimizer and position.",
            metavar="CHECKPOINT",
        ),
    ] = None,
    valid: Annotated[
        list[str] | None,
        typer.Option("--valid", help="One more validation set; may be repeated.", metavar="NAME=DATASET"),
    ] = None,
    sft: Annotated[
        bool,
        typer.Option(
            "--sft", help="Fine-tune on conversations: data ingested with --prompt and --response, or --messages."
        ),
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a Chrome trace of steps 3 to 5 (or profile_steps) under logs/.")
    ] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    output: OutputOption = None,
    track: TrackOption = True,
    as_json: JsonOption = False,
) -> None:
    """Train a model; the same command goes on after an interruption, bit for bit.

    Example: [bold]shardline pretrain --dataset dataset --config model.yaml -s train_steps=500 --output run[/bold]

    Goes on with other data: [bold]shardline pretrain --from run --dataset more -s train_steps=100 --output run2[/bold]
    """
    from flows.initial import file_settings, initial_checkpoint
    from flows.model_presets import model_overrides
    from training.config import PretrainConfig
    from training.stage import PRETRAIN

    where = store_at(store, output)
    inputs, paths = datasets_among(dataset, where)
    sets = [f"valid_sets.{item}" for item in valid or ()]
    if initial is not None:
        begun, more = initial_checkpoint(initial, where, given=file_settings(config), takes_model=model is None)
        inputs, sets = inputs | begun, [*more, *sets]
    overrides = [
        *model_overrides(model),
        *sets,
        *(["sft={}"] if sft else []),
        *(["profile_steps=[3, 5]"] if profile else []),
        *(overrides or ()),
    ]
    settings = settings_of(PretrainConfig, "pretrain", config, overrides, {"datasets": paths})
    if nproc is not None:
        layout = settings.layout
        others = layout.world_size // layout.data_parallel
        if nproc % others:
            raise ConfigError(
                f"--nproc {nproc} is not divisible by layout.tensor_parallel x layout.pipeline_parallel ({others}). "
                f"Start a multiple of {others} ranks."
            )
        more = [*overrides, f"layout.data_parallel={nproc // others}"]
        settings = settings_of(PretrainConfig, "pretrain", config, more, {"datasets": paths})
    hints = [
        "next: shardline inspect {path}",
        "      shardline evaluate --checkpoint {path} --data HELDOUT --output evaluation",
    ]
    run_one(PRETRAIN, settings, where, inputs=inputs, as_json=as_json, track=track, hints=hints)


def reshape(
    checkpoint: CheckpointOption,
    to: Annotated[Literal["native", "huggingface", "megatron"] | None, typer.Option(help="Format to write.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Degree of a native or Megatron target.")] = None,
    pipeline_parallel: Annotated[int | None, typer.Option(help="Degree of a native or Megatron target.")] = None,
    step: StepOption = None,
    dtype: Annotated[
        Literal["keep", "float32", "bf16", "float16"] | None, typer.Option(help="Type of the weights.")
    ] = None,
    average: Annotated[
        list[str] | None,
        typer.Option("--average", help="One more checkpoint to take the mean with; may be repeated.", metavar="PATH"),
    ] = None,
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Leave the optimizer state behind.")] = False,
    logits: Annotated[bool, typer.Option("--logits", help="Also compare the logits of both models.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written and dropped; write nothing.")
    ] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    output: OutputOption = None,
    track: TrackOption = False,
    as_json: JsonOption = False,
) -> None:
    """Move a checkpoint to another parallel layout or format: Hugging Face safetensors, Megatron-LM; or average some.

    Example: [bold]shardline reshape --checkpoint run --to huggingface --output hf[/bold]
    """
    from conversion.config import ReshapeConfig
    from conversion.plan import describe_plan
    from conversion.stage import stage_for

    where = store_at(store, output)
    found = artifact_at(checkpoint, where, ("checkpoint", "model"))
    flags = {
        "checkpoint": checkpoint if found is None else None,
        "to": to,
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
        "step": step,
        "dtype": dtype,
        "average": average,
        "optimizer": False if no_optimizer else None,
        "logits": True if logits else None,
    }
    settings = settings_of(ReshapeConfig, "reshape", config, overrides, flags)
    if dry_run:
        planned = describe_plan(settings, found.path if found is not None else Path(checkpoint))
        if as_json:
            show(planned)
        else:
            print("\n".join(f"{key:<24} {value}" for key, value in planned.items()))
        return
    inputs = {"checkpoint": found} if found is not None else {}
    run_one(stage_for(settings), settings, where, inputs=inputs, as_json=as_json, track=track)


def evaluate(
    checkpoint: CheckpointOption,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="What to measure; several may follow.", metavar="NAME...")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Held-out dataset artifact, .bin/.idx prefix, or text.", metavar="PATH")
    ] = None,
    step: StepOption = None,
    ema: Annotated[bool, typer.Option("--ema", help="Measure the moving average of the weights.")] = False,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens in one forward pass.")] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks to start; more than the layout needs share the rows.")
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    output: OutputOption = None,
    track: TrackOption = True,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity and bits per byte, per subset, straight from a sharded checkpoint.

    Example: [bold]shardline evaluate --checkpoint run --task perplexity --data heldout --output evaluation[/bold]
    """
    from evaluation.config import EvaluateConfig
    from evaluation.stage import EVALUATE

    where = store_at(store, output)
    settings_of(EvaluateConfig, "evaluate", config, overrides, {"tasks": task})  # refused before any work
    inputs: dict[str, Artifact] = {}
    found = native_checkpoint(checkpoint, where)
    if found is not None:
        inputs["checkpoint"] = found
    path = found.path if found is not None else Path(checkpoint)
    dataset = heldout_dataset(data, path, where) if data is not None and not holds_pairs(data) else None
    if dataset is not None:
        inputs["dataset"] = dataset
    flags = {
        "checkpoint": checkpoint if found is None else None,
        "tasks": task,
        "data": data if dataset is None else None,
        "step": step,
        "ema": True if ema else None,
        "batch_tokens": batch_tokens,
        "data_parallel": _copies(nproc, path, step),
    }
    settings = settings_of(EvaluateConfig, "evaluate", config, overrides, flags)
    hints = ["next: shardline report --checkpoint CHECKPOINT --evaluation {path} --output report"]
    run_one(EVALUATE, settings, where, inputs=inputs, as_json=as_json, track=track, hints=hints)


def _copies(nproc: int | None, checkpoint: Path, step: int | None) -> int | None:
    """Copies of the model that `nproc` ranks make at the layout of a checkpoint."""
    if nproc is None:
        return None
    from evaluation.checkpoint import step_folder_of
    from training.step_folders import read_info

    layout = read_info(step_folder_of(checkpoint, step)).layout
    one = int(layout["tensor_parallel"]) * int(layout["pipeline_parallel"])
    if nproc % one:
        raise ConfigError(
            f"--nproc {nproc} is not divisible by tensor_parallel x pipeline_parallel ({one}) of the checkpoint. "
            f"Start a multiple of {one} ranks, or reshape it first."
        )
    return nproc // one


def heldout_dataset(data: str, checkpoint: Path, store: ArtifactStore) -> Artifact:
    """Return the dataset artifact that `data` names; text is tokenized into the store with the model's tokenizer.

    Raises:
        ConfigError: It is neither a dataset nor text, or the checkpoint carries no tokenizer.
    """
    found = artifact_at(data, store, ("dataset",))
    if found is not None:
        return found
    from evaluation.checkpoint import tokenizer_path_of
    from preprocessing.config import IngestConfig
    from preprocessing.stages import INGEST

    tokenizer = tokenizer_path_of(checkpoint)
    print(f"{data} is text; tokenizing it into the store {store.root.resolve()} first.", file=sys.stderr)
    if tokenizer is None:
        raise ConfigError(f"{checkpoint} carries no tokenizer, so the text {data} cannot be tokenized for it.")
    settings = IngestConfig(sources=(data,), tokenizer=str(tokenizer), append_eod=False)
    try:
        return built_on_the_way(INGEST, settings, store, label="heldout")
    except InputError as error:
        raise InputError(
            f"{error} To choose another key, or to set bad records aside: shardline ingest --source {data} --tokenizer "
            f"{tokenizer} --text-key KEY --output heldout, then evaluate --data heldout."
        ) from error


def native_checkpoint(reference: str, store: ArtifactStore) -> Artifact | None:
    """Return the native checkpoint artifact of a reference; other formats are read into the store first.

    None is a native checkpoint folder that is no artifact, such as a single step folder.
    """
    from conversion.config import ReshapeConfig
    from conversion.detect import format_of
    from conversion.stage import RESHAPE

    found = artifact_at(reference, store, ("checkpoint", "model"))
    path = found.path if found is not None else Path(reference)
    if format_of(path) == "native":
        return found
    print(f"{reference} is no native checkpoint; reading it into the store {store.root} first.", file=sys.stderr)
    settings = ReshapeConfig(checkpoint=None if found is not None else reference)
    inputs = {"checkpoint": found} if found is not None else {}
    return built_on_the_way(RESHAPE, settings, store, inputs=inputs, label="imported")


def score(
    checkpoint: CheckpointOption,
    input_file: Annotated[
        Path, typer.Option("--input", help="JSONL with context and continuation in each line.", metavar="FILE.jsonl")
    ],
    step: StepOption = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens in one forward pass.", min=1)] = 8192,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA if there is enough.")] = "auto",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the results. Default: stdout.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score continuations: for each line the log-probability, its token count, and whether it is greedy.

    Example: [bold]shardline score --checkpoint run --input pairs.jsonl[/bold]
    """
    from contracts.files import write_atomically
    from evaluation.score import score_file
    from flows.terminal import TerminalProgress, error_console

    if output is not None and not output.resolve().parent.is_dir():
        raise ConfigError(f"--output {output}: the folder {output.resolve().parent} does not exist. Make it first.")
    found = native_checkpoint(checkpoint, store_at(store))
    path = found.path if found is not None else Path(checkpoint)
    with TerminalProgress("score", error_console()) as progress:
        lines = score_file(path, input_file, step=step, batch_tokens=batch_tokens, device=device, progress=progress)
    if output is not None:
        write_atomically(output, "".join(lines))
        print(f"{len(lines)} results in {output}", file=sys.stderr)
    if as_json:
        show({"checkpoint": str(path), "results": [parse_json(line) for line in lines]})
    elif output is None:
        sys.stdout.writelines(lines)


def report(
    checkpoint: Annotated[str | None, typer.Option(help="Checkpoint artifact to report on.", metavar="REF")] = None,
    evaluation: Annotated[
        list[str] | None, typer.Option("--evaluation", help="Evaluation artifacts to show.", metavar="REF...")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Dataset artifact. Alone: its data card. Default: the checkpoint's own."),
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    output: OutputOption = None,
    track: TrackOption = False,
    as_json: JsonOption = False,
) -> None:
    """Draw loss curve and per-subset plots, or the data card of a dataset: PNG files and one self-contained HTML page.

    Example: [bold]shardline report --checkpoint run --evaluation evaluation --output report[/bold]

    Example: [bold]shardline report --dataset dataset --output data-card[/bold]
    """
    from evaluation.config import DataCardConfig, ReportConfig
    from evaluation.stage import DATA_CARD, REPORT

    where = store_at(store, output)
    if checkpoint is None and dataset is not None and not evaluation:
        card = settings_of(DataCardConfig, "data-card", config, overrides, {})
        given = {"dataset": artifact_of(dataset, where, ("dataset",))}
        run_one(DATA_CARD, card, where, inputs=given, as_json=as_json, track=track, hints=["open {path}/report.html"])
        return
    if checkpoint is None:
        raise ConfigError("report: give --checkpoint REF for a training run, or --dataset REF alone for a data card.")
    inputs = {"checkpoint": artifact_of(checkpoint, where, ("checkpoint", "model"))}
    if dataset is not None:
        inputs["dataset"] = artifact_of(dataset, where, ("dataset",))
    for n, reference in enumerate(evaluation or ()):
        item = artifact_of(reference, where, ("evaluation",))
        inputs[f"evaluation.{item.manifest.label}" if n == 0 else f"evaluation.{item.manifest.label}.{n}"] = item
    settings = settings_of(ReportConfig, "report", config, overrides, {})
    run_one(REPORT, settings, where, inputs=inputs, as_json=as_json, track=track, hints=["open {path}/report.html"])
