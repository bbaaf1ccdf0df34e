"""Settings: YAML with 1.2 numbers in, frozen pydantic models out, and the part of them that is identity.

A setting that cannot change a result is declared with `execution()`; one that a later release
added is declared with `added()` and stays out of the identity while it has its default.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from contracts.errors import ConfigError

S = TypeVar("S", bound="Settings")

_ROLE = "shardline"
_FLOAT = re.compile(
    r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
)
_INT = re.compile(r"^[-+]?[0-9]+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$")
_GROUPED = re.compile(r"^[-+]?[0-9]+(_[0-9]+)+$")
_LEADING_ZERO = re.compile(r"^[-+]?0[0-9_]+$")


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys are errors, defaults are valid."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


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
    return value


class Document:
    """A settings file: plain data, and the line on which each key stands.

    Args:
        data: The mapping, nested.
        source: File name for messages; "command line" for data without a file.
        lines: Path of keys to 1-based line.
    """

    def __init__(
        self, data: dict[str, Any], source: str, lines: Mapping[tuple[str | int, ...], int] | None = None
    ) -> None:
        self.data = data
        self.source = source
        self.lines = dict(lines or {})

    def where(self, path: Sequence[str | int]) -> str:
        """Name the place of a key: file and line, or the file alone."""
        for length in range(len(path), 0, -1):
            line = self.lines.get(tuple(path[:length]))
            if line is not None:
                return f"{self.source}, line {line}"
        return self.source


def load_yaml(path: Path) -> Document:
    """Read a YAML file with YAML 1.2 numbers, so that `1e-4` is a number and `010` is an error.

    Raises:
        ConfigError: The file is missing, no YAML, or not a mapping of keys.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}).") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Document:
    """Read YAML text; see `load_yaml`."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark else source
        raise ConfigError(f"{where}: not YAML: {getattr(error, 'problem', error)}.") from error
    lines: dict[tuple[str | int, ...], int] = {}
    data = {} if node is None else _construct(node, (), lines, source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected settings as `key: value` lines, found {_kind(data)}.")
    return Document(data, source, lines)


def with_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """Apply `a.b=value` texts from the command line; values are read as YAML.

    Raises:
        ConfigError: An override has no `=`, or its path leads through a plain value.
    """
    data = _copied(document.data)
    for text in overrides:
        path, equals, value = text.partition("=")
        keys: list[str | int] = [int(key) if key.isdigit() else key for key in path.strip().split(".")]
        if not equals or "" in keys:
            raise ConfigError(f"-s {text}: write it as key=value, such as -s pretrain.optimizer.lr=3e-4.")
        parsed = parse_yaml(f"value: {value}" if value.strip() else "value: ''", f"-s {text}").data["value"]
        place: Any = data
        for key in keys[:-1]:
            if isinstance(place, dict):
                if place.get(key) is None:
                    place[key] = {}
                place = place[key]
            elif isinstance(place, list) and isinstance(key, int) and key < len(place):
                place = place[key]
            else:
                raise ConfigError(
                    f"-s {text}: {key!r} is no key of a group of settings in {document.source}."
                )
        if isinstance(place, list) and isinstance(keys[-1], int) and keys[-1] < len(place):
            place[keys[-1]] = parsed
        elif isinstance(place, dict):
            place[str(keys[-1])] = parsed
        else:
            raise ConfigError(
                f"-s {text}: {keys[-1]!r} is no key of a group of settings in {document.source}."
            )
    return Document(data, document.source, document.lines)


def validated(model: type[S], document: Document, *, section: str | None = None) -> S:
    """Turn a document, or one section of it, into settings.

    Raises:
        ConfigError: One line for each wrong setting: file and line, name, value, what was
            expected, and the nearest valid name for an unknown one.
    """
    data: Any = document.data if section is None else document.data.get(section) or {}
    prefix: tuple[str | int, ...] = () if section is None else (section,)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False):
            path = prefix + tuple(part for part in item["loc"] if not _is_union_tag(part))
            lines.append(f"{document.where(path)}: {_explain(model, item, path)}")
        raise ConfigError("\n".join(dict.fromkeys(lines))) from error


def _explain(model: type[Settings], item: Any, path: tuple[str | int, ...]) -> str:
    name = ".".join(str(part) for part in path) or "the settings"
    if item["type"] == "extra_forbidden":
        names = _names_beside(model, item["loc"])
        near = difflib.get_close_matches(str(item["loc"][-1]), names, n=1, cutoff=0.5)
        cure = f"Did you mean {near[0]}?" if near else f"Known here: {', '.join(names)}."
        return f"unknown setting {name}. {cure}"
    if item["type"] == "missing":
        return f"{name} is missing; it has no default, so set it."
    if item["type"] == "value_error":
        return f"{name}: {item['ctx']['error']}" if path else str(item["ctx"]["error"])
    return f"{name} is {item['input']!r} ({_kind(item['input'])}): {item['msg']}."


def _names_beside(model: type[Settings], path: Sequence[str | int]) -> list[str]:
    """List the settings that are valid in the group that holds the key at the end of `path`."""
    here: list[type[Settings]] = [model]
    for part in path[:-1]:
        deeper = [
            kind
            for m in here
            if part in m.model_fields
            for kind in _settings_in(m.model_fields[str(part)].annotation)
        ]
        here = deeper or here
    return sorted({name for m in here for name in m.model_fields})


def _settings_in(annotation: Any) -> list[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [found for part in get_args(annotation) for found in _settings_in(part)]


def _is_union_tag(part: str | int) -> bool:
    return isinstance(part, str) and (part.endswith("]") or part[:1].isupper())


def _kind(value: Any) -> str:
    names = {
        "str": "text",
        "float": "number",
        "int": "integer",
        "bool": "true/false",
        "dict": "group",
        "NoneType": "nothing",
    }
    return names.get(type(value).__name__, type(value).__name__)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


class _Loader(yaml.SafeLoader):
    """Composes nodes only; values are made by `_construct`, by the rules of YAML 1.2's core schema."""


def _construct(
    node: yaml.Node, path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int], source: str
) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in result:
                raise ConfigError(
                    f"{source}, line {line}: {'.'.join(map(str, (*path, key)))} is given twice. Keep one."
                )
            lines[(*path, key)] = line
            result[key] = _construct(value_node, (*path, key), lines, source)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, (*path, n), lines, source) for n, item in enumerate(node.value)]
    text = str(node.value)
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return text
    if _LEADING_ZERO.match(text):
        raise ConfigError(
            f"{source}, line {node.start_mark.line + 1}: {'.'.join(map(str, path))} is {text}; a leading zero means octal to "
            f"some readers and decimal to others. Write {text.lstrip('+-0_') or '0'}, or 0o{text.lstrip('+-0_')} for octal."
        )
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if _INT.match(text) or _GROUPED.match(text):
        return int(text.replace("_", ""), 0)
    if _FLOAT.match(text):
        return float(
            text.replace(".inf", "inf").replace(".nan", "nan").replace(".Inf", "inf").replace(".NaN", "nan")
        )
    return text
