"""Pipeline files to start from, and the JSON schema that editors check them with."""

import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from contracts.configuration import Settings, settings_in
from contracts.errors import ConfigError
from contracts.files import write_atomically
from flows.model_presets import with_model
from flows.pipeline import PipelineConfig

_HERE = Path(__file__).resolve().parent


def presets() -> dict[str, Path]:
    """Return the shipped pipeline files by name."""
    for folder in (_HERE / "examples", _HERE.parent / "examples"):  # in a wheel, in a checkout
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def write_preset(folder: Path, name: str, *, model: str | None = None) -> Path:
    """Write a preset as `pipeline.yaml` into a folder, with its schema beside it.

    Args:
        model: Name of a published model to take in place of the preset's.

    Raises:
        ConfigError: The preset does not exist, or there is a pipeline.yaml already.
    """
    known = presets()
    if name not in known:
        raise ConfigError(f"there is no preset {name!r}. Presets: {', '.join(known)}.")
    path = folder / "pipeline.yaml"
    if path.exists():
        raise ConfigError(f"{path} exists already. Choose another folder, or remove it first.")
    text = known[name].read_text(encoding="utf-8").replace(f"{name}.yaml", "pipeline.yaml")
    text = re.sub(r"^store: \.\./\S+( +#.*)?$", r"store: store\1", text, flags=re.MULTILINE)
    text = with_model(text, model) if model is not None else text
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "pipeline.schema.json", json.dumps(schema(), indent=1) + "\n")
    write_atomically(path, text)
    return path


def schema() -> dict[str, object]:
    """Return the JSON schema of a pipeline file."""
    return PipelineConfig.model_json_schema()


def choices_of(annotation: Any) -> list[Any]:
    """List the values that a field's type names."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in choices_of(part)]


def listing(settings: type[Settings], prefix: str = "") -> list[str]:
    """List settings as lines: name, default, meaning; those of a group follow it."""
    lines: list[str] = []
    for name, info in settings.model_fields.items():
        groups = settings_in(info.annotation)
        default = "required" if info.is_required() else info.get_default(call_default_factory=True)
        shown = "" if groups else f" [{default}]"
        choices = choices_of(info.annotation)
        values = f" (one of {', '.join(map(str, choices))})" if choices and not groups else ""
        lines.append(f"{prefix}{name}{shown}{values}  {info.description or ''}".rstrip())
        for group in groups:
            lines += listing(group, f"{prefix}{name}.")
    return lines
