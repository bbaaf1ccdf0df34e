"""Settings files: YAML with the numbers of YAML 1.2 in, plain data and the line of each key out."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from contracts.errors import ConfigError

_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
_INT = re.compile(r"^[-+]?[0-9]+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$")
_GROUPED = re.compile(r"^[-+]?[0-9]+(_[0-9]+)+$")
_LEADING_ZERO = re.compile(r"^[-+]?0[0-9_]+$")
_MOST_VALUES = 100_000
MAX_NAMED = 3  # overrides named in one message

Keys = tuple[str | int, ...]


class Document:
    """A settings file: plain data, and the line on which each key stands.

    Args:
        data: The mapping, nested.
        source: File name for messages; "command line" for data without a file.
        lines: Path of keys to 1-based line.
        origins: Path of keys to the text on the command line that set it.
    """

    def __init__(
        self,
        data: dict[str, Any],
        source: str,
        lines: Mapping[Keys, int] | None = None,
        origins: Mapping[Keys, str] | None = None,
    ) -> None:
        self.data = data
        self.source = source
        self.lines = dict(lines or {})
        self.origins = dict(origins or {})

    def where(self, path: Sequence[str | int]) -> str:
        """Name the place of a key: the override that set it, file and line, or the file alone."""
        for length in range(len(path), 0, -1):
            if tuple(path[:length]) in self.origins:
                return self.origins[tuple(path[:length])]
            line = self.lines.get(tuple(path[:length]))
            if line is not None:
                return f"{self.source}, line {line}{self._overridden_below(tuple(path))}"
        return f"{self.source}{self._overridden_below(tuple(path))}"

    def _overridden_below(self, path: Keys) -> str:
        """Name the overrides inside a group, since one of them may be what is wrong with it."""
        found = [text for keys, text in self.origins.items() if keys[: len(path)] == path]
        return f" with {', '.join(found)}" if 0 < len(found) <= MAX_NAMED else ""


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
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply to be settings.") from None
    lines: dict[Keys, int] = {}
    data = {} if node is None else _construct(node, (), lines, source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected settings as `key: value` lines, found {kind_of(data)}.")
    return Document(data, source, lines)


def with_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """Apply `a.b=value` texts from the command line; values are read as YAML.

    Raises:
        ConfigError: An override has no `=`, or its path leads through a plain value.
    """
    data = _copied(document.data)
    origins = dict(document.origins)
    for text in overrides:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        if not equals or "" in keys:
            raise ConfigError(f"-s {text}: write it as key=value, such as -s pretrain.optimizer.lr=3e-4.")
        parsed = parse_yaml(f"value: {value}" if value.strip() else "value: ''", f"-s {text}").data["value"]
        place: Any = data
        walked: list[str | int] = []
        for n, key in enumerate(keys):
            is_last = n == len(keys) - 1
            if isinstance(place, dict):
                if is_last:
                    place[key] = parsed
                elif place.get(key) is None:
                    place[key] = {}
                walked.append(key)
            elif isinstance(place, list) and key.isdigit() and int(key) < len(place):
                if is_last:
                    place[int(key)] = parsed
                walked.append(int(key))
            else:
                raise ConfigError(f"-s {text}: {'.'.join(map(str, walked))} holds no key {key!r} in {document.source}.")
            place = place[walked[-1]]
        origins[tuple(walked)] = f"-s {text}"
    return Document(data, document.source, document.lines, origins)


def kind_of(value: Any) -> str:
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


def _construct(node: yaml.Node, path: Keys, lines: dict[Keys, int], source: str) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if len(lines) > _MOST_VALUES:
        raise ConfigError(
            f"{source}: more than {_MOST_VALUES} values; aliases of aliases multiply them. Write them out."
        )
    if len(path) > 100:
        raise ConfigError(f"{source}, line {node.start_mark.line + 1}: nested deeper than 100; an alias holds itself.")
    if not node.tag.startswith("tag:yaml.org,2002:") or "python/" in node.tag:
        raise ConfigError(f"{source}, line {node.start_mark.line + 1}: the tag {node.tag} is not supported.")
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{source}, line {line}: a key must be plain text.")
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
    if "\0" in text or (not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)):
        raise ConfigError(
            f"{source}, line {node.start_mark.line + 1}: {'.'.join(map(str, path))} holds a NUL or half of a character."
        )
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return text
    if _LEADING_ZERO.match(text):
        digits = text.lstrip("+-0_")
        raise ConfigError(
            f"{source}, line {node.start_mark.line + 1}: {'.'.join(map(str, path))} is {text}; a leading zero "
            f"means octal to some readers and decimal to others. Write {digits or '0'}, or 0o{digits} for octal."
        )
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if _INT.match(text) or _GROUPED.match(text):
        try:
            return int(text.replace("_", ""), 0)
        except ValueError:  # thousands of digits
            raise ConfigError(
                f"{source}, line {node.start_mark.line + 1}: {'.'.join(map(str, path))}: the number is too large."
            ) from None
    if _FLOAT.match(text):
        return float(text.replace(".inf", "inf").replace(".nan", "nan").replace(".Inf", "inf").replace(".NaN", "nan"))
    return text
