"""Settings: YAML with 1.2 numbers in, frozen pydantic models out, and the part of them that is identity.

A setting that cannot change a result is declared with `execution()`; one that a later release
added is declared with `added()` and stays out of the identity while it has its default.
"""

import difflib
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from contracts.documents import Document, kind_of, load_yaml, parse_yaml, with_overrides
from contracts.errors import ConfigError

__all__ = [
    "Document",
    "Settings",
    "added",
    "execution",
    "identity",
    "load_yaml",
    "parse_yaml",
    "settings_in",
    "validated",
    "with_overrides",
]

S = TypeVar("S", bound="Settings")

_ROLE = "shardline"
_LARGEST = 2**63 - 1


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys are errors, defaults are valid."""

    habits: ClassVar[Mapping[str, str]] = {}
    """Other tools' names of settings, for the question "did you mean"."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_is_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool):
            kinds = _kinds_in(cls.model_fields[info.field_name or ""].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"{str(value).lower()} is no number.")
        return value

    @field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"{_shortened(str(value))} is too large; integers go up to {_LARGEST}.")
        return value


def _kinds_in(annotation: Any) -> set[Any]:
    return {annotation}.union(*(_kinds_in(part) for part in get_args(annotation) if isinstance(part, type)))


def execution(default: Any, *, description: str, **constraints: Any) -> Any:
    """Declare a setting that cannot change the result: it stays out of the fingerprint."""
    return Field(default, description=description, json_schema_extra={_ROLE: "execution"}, **constraints)


def added(default: Any, *, description: str, **constraints: Any) -> Any:
    """Declare a setting of a later release: out of the fingerprint while it has its default."""
    return Field(default, description=description, json_schema_extra={_ROLE: "added"}, **constraints)


def identity(settings: Settings) -> dict[str, Any]:
    """Return the settings that decide the result, as plain data for a recipe."""
    result: dict[str, Any] = {}
    for name, info in type(settings).model_fields.items():
        role = _role(info)
        value = getattr(settings, name)
        if role == "execution" or (role == "added" and value == info.get_default(call_default_factory=True)):
            continue
        result[name] = _identity_of(value)
    return result


def _role(info: FieldInfo) -> str | None:
    extra = info.json_schema_extra
    role = extra.get(_ROLE) if isinstance(extra, dict) else None
    return role if isinstance(role, str) else None


def _identity_of(value: Any) -> Any:
    if isinstance(value, Settings):
        return identity(value)
    if isinstance(value, Mapping):
        return {str(key): _identity_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_identity_of(item) for item in value]
    if isinstance(value, Path):
        return value.as_posix()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted((_identity_of(item) for item in value), key=str)
    return value


def validated(model: type[S], document: Document, *, section: str | None = None) -> S:
    """Turn a document, or one section of it, into settings.

    Raises:
        ConfigError: One line for each wrong setting: file and line, name, value, what was
            expected, and the nearest valid name for an unknown one.
    """
    data: Any = document.data if section is None else document.data.get(section)
    data = {} if data is None else data
    prefix: tuple[str | int, ...] = () if section is None else (section,)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False):
            path = prefix + _path_in(data, item)
            lines.append(f"{document.where(path)}: {_explain(model, item, path)}")
        raise ConfigError("\n".join(dict.fromkeys(lines))) from error


def _path_in(data: Any, item: Any) -> tuple[str | int, ...]:
    """Keep of an error's location what the user wrote: pydantic adds the names of a union's members."""
    path: list[str | int] = []
    place = data
    for n, part in enumerate(item["loc"]):
        is_last = n == len(item["loc"]) - 1
        is_key = isinstance(place, Mapping) and part in place
        if is_key or (isinstance(place, list) and isinstance(part, int) and part < len(place)):
            place = place[part]
        elif not (is_last and item["type"] == "missing"):
            continue
        path.append(part)
    return tuple(path)


def _explain(model: type[Settings], item: Any, path: tuple[str | int, ...]) -> str:
    name = ".".join(str(part) for part in path) or "the settings"
    if item["type"] == "extra_forbidden":
        names = _names_beside(model, item["loc"])
        unknown = str(item["loc"][-1])
        known = [
            dotted for dotted in _names_below(model) if unknown in (dotted.rpartition(".")[2], *_habits(model, dotted))
        ]
        near = known[:1] or difflib.get_close_matches(unknown, names, n=1, cutoff=0.6)
        cure = f"Did you mean {near[0]}?" if near else f"Known here: {', '.join(names)}."
        return f"unknown setting {name}. {cure}"
    if item["type"] == "missing":
        return f"{name} is missing; it has no default, so set it."
    if item["type"] == "value_error":
        return f"{name}: {item['ctx']['error']}" if path else str(item["ctx"]["error"])
    return f"{name} is {_shortened(repr(item['input']))} ({kind_of(item['input'])}): {item['msg']}."


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _names_beside(model: type[Settings], path: Sequence[str | int]) -> list[str]:
    """List the settings that are valid in the group that holds the key at the end of `path`."""
    here: list[type[Settings]] = [model]
    for part in path[:-1]:
        deeper = [
            kind for m in here if part in m.model_fields for kind in settings_in(m.model_fields[str(part)].annotation)
        ]
        here = deeper or here
    return sorted({name for m in here for name in m.model_fields})


def _names_below(model: type[Settings], prefix: str = "") -> list[str]:
    """List every setting of a model, those of its groups with dots."""
    names = []
    for name, info in model.model_fields.items():
        names.append(f"{prefix}{name}")
        for group in settings_in(info.annotation):
            names += _names_below(group, f"{prefix}{name}.")
    return names


def _habits(model: type[Settings], dotted: str) -> tuple[str, ...]:
    """Other tools' names of a setting."""
    *groups, name = dotted.split(".")
    for group in groups:
        model = settings_in(model.model_fields[group].annotation)[0]
    return tuple(habit for habit, meant in model.habits.items() if meant == name)


def settings_in(annotation: Any) -> list[type[Settings]]:
    """List the groups of settings that a field's type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [found for part in get_args(annotation) for found in settings_in(part)]
