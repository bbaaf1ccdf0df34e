"""Commands that read and change nothing: inspect, verify, diff, lineage, trace, estimate, schema."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from contracts.errors import ConfigError, InputError
from contracts.store import ArtifactStore
from flows.options import ConfigOption, JsonOption, ModelOption, SetOption, StoreOption, show, store_at
from flows.references import artifact_at

Reference = Annotated[str, typer.Argument(help="Path, artifact name, or prefix of a fingerprint.", metavar="REF")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    for command in (inspect, verify, diff, lineage, trace, estimate, schema):
        app.command(rich_help_panel="Look, compare, trace")(command)


def inspect(
    reference: Reference,
    digest: Annotated[
        bool, typer.Option("--digest", help="Of a checkpoint, also a digest of its weights, equal in every format.")
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what something is: dataset, tokenizer, checkpoint (own or foreign), any artifact.

    Example: [bold]shardline inspect dataset/data-00000.idx[/bold]
    """
    from flows.inspection import inspect_path, render

    where = store_at(store)
    artifact = artifact_at(reference, where)
    path = artifact.path if artifact is not None else Path(reference)
    found = inspect_path(path, artifact)
    if digest:
        from conversion.inspection import damaged_files
        from conversion.model_digest import model_digest
        from conversion.reading import open_checkpoint

        checkpoint = open_checkpoint(path)
        if damaged := damaged_files(checkpoint):
            raise InputError(f"{damaged[0]}. There is no digest of damaged weights.")
        found["model_digest"] = model_digest(checkpoint)
    if as_json:
        show(found)
    else:
        print("\n".join(render(found)))


def verify(reference: Reference, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Re-read everything and name what is damaged: digests, .idx against .bin, ids, shapes. Exit code 1 if any.

    Example: [bold]shardline verify run[/bold]
    """
    from flows.inspection import verify_path

    where = store_at(store)
    artifact = artifact_at(reference, where)
    problems, checked = verify_path(artifact.path if artifact is not None else Path(reference), artifact)
    if as_json:
        show({"reference": reference, "checked": checked, "problems": problems})
    else:
        for problem in problems:
            print(problem)
        count = f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"
        print(f"{count}; checked {', '.join(checked)}." if problems else f"sound: {', '.join(checked)}.")
    if problems:
        raise typer.Exit(1)


def diff(
    a: Reference,
    b: Annotated[str, typer.Argument(help="The other one.", metavar="REF")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what differs between two artifacts or checkpoints: settings, data, weights, numbers.

    Example: [bold]shardline diff demo-1a2b demo-3c4d[/bold]
    """
    from contracts.difference import artifact_changes
    from flows.inspection import render, weight_differences

    where = store_at(store)
    first, second = (artifact_at(text, where) for text in (a, b))
    paths = [item.path if item is not None else Path(text) for item, text in ((first, a), (second, b))]
    weights = weight_differences(paths[0], paths[1])
    result: dict[str, Any] = dict(weights)
    if first is not None and second is not None:
        groups = artifact_changes(first, second)
        if first.manifest.recipe.stage != second.manifest.recipe.stage:
            # Settings of two different stages have nothing to do with each other.
            groups = {name: found for name, found in groups.items() if name == "files"}
        # What the ranks printed differs in every run and says nothing about the result.
        result |= {
            group: [str(change) for change in found if not change.field.startswith("logs/")]
            for group, found in groups.items()
        }
    if not result:
        raise ConfigError(
            f"{a} and {b} are neither artifacts nor checkpoints; nothing is known about how to compare them."
        )
    if as_json:
        show(result)
        return
    if (found := weights.get("weights")) is not None:
        print(f"weights: {found['equal_tensors']} tensors equal, {found['different_tensors']} differ")
        print("\n".join(render({name: found[name] for name in found if name not in _COUNTS}, "  ")))
    for group, lines in result.items():
        if group != "weights":
            print(f"{group}: {'same' if not lines else ''}")
            print("".join(f"  {line}\n" for line in lines), end="")


_COUNTS = ("equal_tensors", "different_tensors")


def lineage(
    reference: Annotated[str, typer.Argument(help="Artifact; or the word sync.", metavar="REF|sync")],
    down: Annotated[bool, typer.Option("--down", help="Show what was made of it, not what it was made of.")] = False,
    as_html: Annotated[bool, typer.Option("--html", help="Print one self-contained HTML page.")] = False,
    store: StoreOption = None,
    experiment: Annotated[str, typer.Option(help="MLflow experiment that `lineage sync` writes to.")] = "shardline",
    mlflow: Annotated[str | None, typer.Option(help="MLflow address for sync. Default: the store's own.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show where an artifact comes from. `lineage sync` writes the whole store to MLflow again.

    Example: [bold]shardline lineage demo-1a2b3c --html > lineage.html[/bold]
    """
    from contracts import lineage as graph

    where = store_at(store)
    if reference == "sync":
        _sync(where, experiment, mlflow, as_json=as_json)
        return
    artifact = where.find(reference)
    relatives = graph.descendants(where, artifact) if down else graph.ancestors(where, artifact)
    if as_json:
        show(graph.as_data(artifact, relatives))
    elif as_html:
        both = graph.as_html(artifact, up=graph.ancestors(where, artifact), down=graph.descendants(where, artifact))
        sys.stdout.write(both)
    else:
        print(graph.as_text(artifact, relatives))


def _sync(store: ArtifactStore, experiment: str, uri: str | None, *, as_json: bool) -> None:
    from flows.recording import sync_store

    counts = sync_store(store, experiment=experiment, uri=uri, note=lambda text: print(text, file=sys.stderr))
    if as_json:
        show(counts)
    else:
        print(", ".join(f"{name} {count}" for name, count in counts.items()))


def trace(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint artifact.", metavar="CHECKPOINT")],
    step: Annotated[int, typer.Option(help="Optimizer step, counted from 1.")],
    text: Annotated[bool, typer.Option("--text", help="Also print the text that the model saw.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the documents that the model saw at a step: file, record, subset, and the span of tokens.

    Example: [bold]shardline trace demo-1a2b3c --step 100[/bold]
    """
    from flows.tracing import trace_step

    where = store_at(store)
    artifact = artifact_at(checkpoint, where, ("checkpoint",))
    if artifact is None:
        raise ConfigError(
            f"{checkpoint} is no finished training run: trace needs its manifest.json, written when it ends."
        )
    rows = trace_step(artifact, step, where, with_text=text)
    if as_json:
        show({"checkpoint": artifact.name, "step": step, "documents": rows})
        return
    for row in rows:
        span = f"tokens {row['offset']}..{row['offset'] + row['length']}"
        print(f"sample {row['sample']:<8} {row['file']}:{row['record']}  {row['subset'] or '-'}  {span}")
        if text:
            print("  " + row["text"].replace("\n", "\n  "))
    print(f"{len(rows)} parts of documents in {len({row['sample'] for row in rows})} samples of step {step}.")


def estimate(
    file: Annotated[
        Path | None, typer.Argument(help="Pipeline file, or a file of pretrain settings.", metavar="FILE")
    ] = None,
    model: ModelOption = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary, where the file leaves it to the tokenizer.")
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate parameters, memory per rank, FLOPs per token, pipeline bubble and time of a training run.

    With --model alone, a published model at the layout of its file.

    Example: [bold]shardline estimate my-run/pipeline.yaml -s pretrain.layout.tensor_parallel=4[/bold]
    """
    from flows.model_presets import model_overrides, model_preset
    from flows.options import settings_of
    from training.config import PretrainConfig, with_vocab_size
    from training.estimate import estimate as estimated

    path = file or config
    if path is None and model is not None:
        path = model_preset(model)
    overrides = [*model_overrides(model), *(overrides or ())]
    settings = settings_of(PretrainConfig, "pretrain", path, overrides, {})
    if settings.model.vocab_size is None:
        size = vocab_size or _vocab_size_in(path)
        if size is None:
            raise ConfigError("model.vocab_size is not set, and no tokenizer section tells it. Give --vocab-size.")
        settings = with_vocab_size(settings, size)
    result = estimated(settings)
    if as_json:
        show(result.as_data())
    else:
        print("\n".join(f"{key:<28} {value}" for key, value in result.as_lines().items()))


def _vocab_size_in(path: Path | None) -> int | None:
    from contracts.configuration import load_yaml

    section = load_yaml(path).data.get("tokenizer") if path is not None else None
    size = section.get("vocab_size", 8192) if isinstance(section, dict) else None
    return size if isinstance(size, int) else None


def schema(
    stage: Annotated[
        str | None, typer.Argument(help="One stage. Default: a whole pipeline file.", metavar="STAGE")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="List names, defaults and meanings for a person.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the JSON schema of a pipeline file, or of one stage's settings; --text lists them to read.

    Example: [bold]shardline schema pretrain --text[/bold]
    """
    from flows.pipeline import PipelineConfig
    from flows.presets import listing
    from flows.stages import stage_named

    settings = PipelineConfig if stage is None else stage_named(stage).settings
    if text and not as_json:
        print("\n".join(listing(settings)))
    else:
        show(settings.model_json_schema())
