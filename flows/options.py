"""Options that several commands share, and how flags, a file and -s become one stage's settings."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from contracts.artifact import Artifact
from contracts.configuration import Document, Settings, load_yaml, validated, with_overrides
from contracts.store import ArtifactStore
from flows.paths import PATHS, with_absolute_paths

S = TypeVar("S", bound=Settings)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="YAML file with the stage's settings, or a pipeline file with its section.",
        metavar="FILE",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", help="One setting, as key=value; may be repeated. Wins over --config.", metavar="KEY=VALUE"
    ),
]
StoreOption = Annotated[
    Path | None,
    typer.Option("--store", help="Artifact store. Default: SHARDLINE_STORE, else ./store.", metavar="DIR"),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Folder for the artifact. Default: a named folder in the store.", metavar="DIR"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs instead of text.")]

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Sizes of a published model, such as pythia-160m; an unknown name lists them. -s wins over it.",
        metavar="NAME",
    ),
]

TrackOption = Annotated[bool, typer.Option("--track/--no-track", help="Record the run in MLflow.")]


def store_at(store: Path | None, output: Path | None = None) -> ArtifactStore:
    """Return the store a command works on."""
    root = store or Path(os.environ.get("SHARDLINE_STORE") or "store")
    return ArtifactStore(root, output=output)


def settings_of(
    model: type[S], section: str, config: Path | None, overrides: Sequence[str] | None, flags: Mapping[str, Any]
) -> S:
    """Join a settings file, -s overrides and flags; a flag that was not given is None and changes nothing.

    Raises:
        ConfigError: A setting is wrong; names it, its value and the cure.
    """
    document = load_yaml(config) if config is not None else Document({}, "command line")
    inner = document.data.get(section)
    if isinstance(inner, dict):  # a pipeline file: take the stage's section
        lines = {path[1:]: line for path, line in document.lines.items() if path[:1] == (section,)}
        document = Document(inner, document.source, lines)
    if config is not None:
        document = with_absolute_paths(document, config.resolve().parent, PATHS.get(section, ()))
    document = with_overrides(document, [_in_section(text, section) for text in overrides or ()])
    data = {**document.data, **{name: value for name, value in flags.items() if value not in (None, [], ())}}
    return validated(model, Document(data, document.source, document.lines, document.origins))


def _in_section(text: str, section: str) -> str:
    """Accept `pretrain.layout.tensor_parallel=2` as well as `layout.tensor_parallel=2`."""
    return text.removeprefix(f"{section}.")


def show(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    json.dump(value, sys.stdout, indent=1, ensure_ascii=False, default=str)
    sys.stdout.write("\n")


def headline(artifact: Artifact) -> dict[str, str]:
    """Return the numbers of an evaluation that models are compared by; {} for other artifacts."""
    metrics = artifact.summary.get("metrics")
    if not isinstance(metrics, Mapping):
        return {}
    keys = ("bits_per_byte", "perplexity", "loss_nats")
    return {key: f"{metrics[key]:.8g}" for key in keys if isinstance(metrics.get(key), int | float)}


def tell_rejected(artifact: Artifact, say: Callable[[str], None]) -> None:
    """Say how many records a stage set aside, and where they are listed."""
    if rejected := artifact.summary.get("rejected"):
        listed = artifact.path / "rejects.jsonl"
        where = f", listed in {listed}" if listed.is_file() else ""
        say(f"  {rejected} bad records set aside{where}")
