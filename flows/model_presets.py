"""Published models, as files of pretraining settings that `--model NAME` finds by name."""

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from contracts.configuration import load_yaml
from contracts.errors import ConfigError

_HERE = Path(__file__).resolve().parent


def model_presets() -> dict[str, Path]:
    """Return the shipped models by name: each a file for `--config`, with its source and its parameters on top."""
    for folder in (_HERE / "examples" / "models", _HERE.parent / "examples" / "models"):  # in a wheel, in a checkout
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def model_preset(name: str) -> Path:
    """Return the file of a published model.

    Raises:
        ConfigError: There is none of this name; names the nearest, or all.
    """
    known = model_presets()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    cure = f"Did you mean {near[0]}?" if near else f"Known are {', '.join(known)}."
    raise ConfigError(f"--model {name}: there is no published model of this name. {cure}")


def model_overrides(name: str | None) -> list[str]:
    """Write the model of a preset as `-s` settings, for a run whose other settings are its own."""
    if name is None:
        return []
    model = load_yaml(model_preset(name)).data["model"]
    return [f"model.{key}={json.dumps(value)}" for key, value in model.items()]


def with_model(pipeline: str, name: str) -> str:
    """Put a preset's model in place of the one in the text of a pipeline file; comments elsewhere stay."""
    path = model_preset(name)
    lines = path.read_text(encoding="utf-8").splitlines()
    about = [line for line in lines if line.startswith("#")]
    model = _block(lines, "model:")
    indented = [f"  {line}" for line in (*about, *model)]
    before = pipeline.splitlines()
    old = _block(before, "  model:")
    if not old:
        raise ConfigError("this preset of a chain has no model to replace. Leave --model out.")
    start = before.index(old[0])
    text = "\n".join((*before[:start], *indented, *before[start + len(old) :])) + "\n"
    length = int(load_yaml(path).data["model"]["max_position_embeddings"])

    def shortened(found: re.Match[str]) -> str:
        return f"{found[1]}{min(int(found[2]), length)}"

    return re.sub(r"^(  seq_length: )(\d+)", shortened, text, flags=re.MULTILINE)


def _block(lines: Sequence[str], head: str) -> list[str]:
    """Return the lines of a group of settings, its head first."""
    if head not in lines:
        return []
    start, indent = lines.index(head), len(head) - len(head.lstrip())
    stop = start + 1
    while stop < len(lines) and len(lines[stop]) - len(lines[stop].lstrip()) > indent:
        stop += 1
    return list(lines[start:stop])
