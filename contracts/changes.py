"""Field-by-field differences of nested values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOT_SET = "(not set)"


@dataclass(frozen=True)
class Change:
    """One field with two values, as it is called in a recipe: "config.optimizer.lr"."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: {_short(self.old)} -> {_short(self.new)}"


def changes(old: Any, new: Any) -> tuple[Change, ...]:
    """List the leaves of two nested values that differ; names are joined by dots."""
    before, after = flatten(old), flatten(new)
    names = sorted({*before, *after})
    pairs = [(name, before.get(name, NOT_SET), after.get(name, NOT_SET)) for name in names]
    return tuple(Change(name, old_value, new_value) for name, old_value, new_value in pairs if old_value != new_value)


def flatten(value: Any, prefix: str = "", *, separator: str = ".") -> dict[str, Any]:
    """Flatten nested mappings and lists into one level of joined names; empty ones stay as they are."""
    if isinstance(value, Mapping) and value:
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        items = [(str(n), item) for n, item in enumerate(value)]
    else:
        return {prefix: list(value) if isinstance(value, tuple) else value}
    result: dict[str, Any] = {}
    for key, item in items:
        result.update(flatten(item, f"{prefix}{separator}{key}" if prefix else key, separator=separator))
    return result


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
