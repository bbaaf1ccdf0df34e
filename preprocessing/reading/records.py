"""Records of a corpus: one JSON object or Parquet row each, with a text and perhaps a subset.

`parse_block` turns a block into good records and rejects. Every line is one of: a document, empty
(blank line, or a text of no characters), or rejected with a reason. Rules:

- orjson reads the line; what it refuses, Python's `json` decides, so both give one result:
  duplicate keys: the last wins; NaN is read; lone surrogates are judged below.
- A byte order mark at the start of a line (files joined with `cat`) is no part of the record.
- Invalid UTF-8 and lone surrogates in the text reject the record, or are replaced by U+FFFD.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from preprocessing.reading.blocks import Block, Filtered, LineBlock, RowBlock
from preprocessing.reading.turns import BadTurnsError, TurnFormat

BOM = b"\xef\xbb\xbf"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MISSING = object()


@dataclass(frozen=True)
class RecordFormat:
    """Where the text of a record is, and what to do with invalid Unicode.

    Args:
        text_key: Key of the text; dots go into nested objects.
        subset_key: Key of the subset name, likewise; records may lack it.
        replaces_invalid: Replace invalid UTF-8 and lone surrogates by U+FFFD, not reject.
        content: What files of lines hold; "auto" tells by name and first character.
        text_unit: What is one document in plain text.
        checked_only: Of a damaged compressed file take only what stands under a checksum that holds.
        turns: Records are conversations; `text_key` is not used. None: they are texts.
    """

    text_key: str = "text"
    subset_key: str = "meta.pile_set_name"
    replaces_invalid: bool = False
    content: Literal["auto", "jsonl", "text"] = "auto"
    text_unit: Literal["line", "paragraph", "document"] = "document"
    checked_only: bool = False
    turns: TurnFormat | None = None


@dataclass(frozen=True)
class Record:
    """One good record; `offset` is the byte offset of its line in the decompressed file (0 in Parquet)."""

    file: str
    line: int
    offset: int
    text: str
    subset: str | None


@dataclass(frozen=True)
class Reject:
    """One bad record."""

    file: str
    line: int
    offset: int
    reason: str


@dataclass
class ParsedBlock:
    """What a block holds, by columns: no object is made for a good record.

    Args:
        file: Name of the file.
        texts, lines, offsets, subsets: (documents,) of each good record its text, line, byte
            offset and subset name.
        turns: (documents,) texts that joined are the text of a conversation; empty where records are texts.
        empty_lines, empty_offsets, empty_subsets: The same of records without text.
        filtered: (line, reason) of records that are no documents by rule.
        events: (line, what, count) of things that were mended: "replaced_characters" (U+FFFD put
            in), "byte_order_marks" (taken out).
    """

    file: str = ""
    texts: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    subsets: list[str | None] = field(default_factory=list)
    turns: list[list[str]] = field(default_factory=list)
    empty_lines: list[int] = field(default_factory=list)
    empty_offsets: list[int] = field(default_factory=list)
    empty_subsets: list[str | None] = field(default_factory=list)
    filtered: list[tuple[int, str]] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    events: list[tuple[int, str, int]] = field(default_factory=list)

    def add(self, line: int, offset: int, text: str, subset: str | None) -> None:
        """Add a record that is no reject."""
        if text:
            self.texts.append(text)
            self.lines.append(line)
            self.offsets.append(offset)
            self.subsets.append(subset)
        else:
            self.empty_lines.append(line)
            self.empty_offsets.append(offset)
            self.empty_subsets.append(subset)

    def records(self) -> Iterator[Record]:
        """Yield the good records one by one."""
        for line, offset, text, subset in zip(self.lines, self.offsets, self.texts, self.subsets, strict=True):
            yield Record(self.file, line, offset, text, subset)

    def with_empty(self) -> "ParsedBlock":
        """Return the same block with its empty records among the good ones, by line."""
        if not self.empty_lines:
            return self
        everything = [
            *zip(self.lines, self.offsets, self.texts, self.subsets, strict=True),
            *zip(self.empty_lines, self.empty_offsets, [""] * len(self.empty_lines), self.empty_subsets, strict=True),
        ]
        lines, offsets, texts, subsets = zip(*sorted(everything, key=lambda row: row[0]), strict=True)
        return ParsedBlock(
            self.file,
            list(texts),
            list(lines),
            list(offsets),
            list(subsets),
            filtered=self.filtered,
            rejects=self.rejects,
            events=self.events,
        )


class _BadRecordError(Exception):
    """The reason why a record is refused."""


def parse_block(block: Block, form: RecordFormat) -> ParsedBlock:
    """Parse the records of a block; bad ones become rejects, never exceptions."""
    if isinstance(block, RowBlock):
        return _parse_rows(block, form)
    return _parse_text_lines(block, form) if block.is_text else _parse_json_lines(block, form)


def _parse_json_lines(block: LineBlock, form: RecordFormat) -> ParsedBlock:
    import orjson

    parsed = ParsedBlock(block.source.name)
    if form.turns is not None:
        return _parse_conversations(parsed, block, form)
    texts, numbers, offsets, subsets = parsed.texts, parsed.lines, parsed.offsets, parsed.subsets
    loads, text_key, subset_of = orjson.loads, form.text_key, _SubsetReader(form.subset_key)
    offset = block.start.offset
    lines = block.data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, block.start.line):
        try:
            record = loads(line)
            text = record[text_key]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            text = None
        if text.__class__ is str and text:  # the usual record; orjson lets no lone surrogate through
            texts.append(text)
            numbers.append(number)
            offsets.append(offset)
            subsets.append(subset_of(record))
        else:
            _add_unusual(parsed, line, number, offset, form)
        offset += len(line) + 1
    return parsed


def _parse_conversations(parsed: ParsedBlock, block: LineBlock, form: RecordFormat) -> ParsedBlock:
    offset = block.start.offset
    lines = block.data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, block.start.line):
        _add_unusual(parsed, line, number, offset, form)
        offset += len(line) + 1
    return parsed


def _add_unusual(parsed: ParsedBlock, line: bytes, number: int, offset: int, form: RecordFormat) -> None:
    try:
        record, replaced, marks = _parse_line(line, form)
        turns = [] if record is None else _turns_of(record, form)
        text = "".join(turns)
        if not text.isascii():
            text, surrogates = _without_lone_surrogates(text, form)
            if surrogates and form.turns is not None:
                turns = [_LONE_SURROGATE.sub("\ufffd", turn) for turn in turns]
            replaced += surrogates
    except _BadRecordError as error:
        parsed.rejects.append(Reject(parsed.file, number, offset, str(error)))
        return
    parsed.add(number, offset, text, None if record is None else _SubsetReader(form.subset_key)(record))
    if text and form.turns is not None:
        parsed.turns.append(turns)
    if replaced:
        parsed.events.append((number, "replaced_characters", replaced))
    if marks:
        parsed.events.append((number, "byte_order_marks", marks))


def _parse_line(line: bytes, form: RecordFormat) -> tuple[Any, int, int]:
    """Return the record, U+FFFD put in and byte order marks taken out; a blank line is no record: None."""
    import orjson

    replaced = 0
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        if line.startswith(BOM):
            record, replaced, marks = _parse_line(line[len(BOM) :], form)
            return record, replaced, marks + 1
        if not line.strip():
            return None, 0, 0
        record, replaced = _parse_hard_line(line, form)
    if record is None:
        raise _BadRecordError(f"the record is null, not an object with the key {form.text_key!r}")
    return record, replaced, 0


def _turns_of(record: Any, form: RecordFormat) -> list[str]:
    """Return the text of a record, or the turns of a conversation, whose texts joined are its text."""
    if form.turns is None:
        return [_text_of(record, form.text_key)]
    try:
        return form.turns.turns_of(record)
    except BadTurnsError as error:
        raise _BadRecordError(str(error)) from None


def _parse_hard_line(line: bytes, form: RecordFormat) -> tuple[Any, int]:
    """Parse a line that orjson refuses, with Python's `json`; say why if that refuses it too."""
    if not line.strip(b"\0\r\n\t "):
        raise _BadRecordError(f"{len(line)} NUL bytes instead of a record, as a crashed writer leaves")
    replaced = 0
    try:
        decoded = line.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte 0x{line[error.start]:02x} at position {error.start} of the line is not valid UTF-8"
        if not form.replaces_invalid:
            what = "; the record is incomplete" if error.end >= len(line.rstrip()) else ""
            raise _BadRecordError(f"{where}{what}") from None
        decoded = line.decode("utf-8", errors="replace")
        replaced = decoded.count("\ufffd") - line.count("\ufffd".encode())
    try:
        return json.loads(decoded), replaced
    except RecursionError:
        raise _BadRecordError("JSON is nested too deeply to be read") from None
    except ValueError as error:
        detail = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise _BadRecordError(f"invalid or incomplete JSON ({detail}){_hint(decoded.strip())}") from None


def _hint(line: str) -> str:
    """Say what is usual when a whole file is of another form."""
    if line in ("{", "[", "[{"):
        return "; the file seems to hold JSON over several lines: write each record on one line (jq -c)"
    if not line.startswith("{"):
        return '; each line must be one JSON object such as {"text": "..."}'
    return ""


def _text_of(record: Any, key: str) -> str:
    if not isinstance(record, dict):
        raise _BadRecordError(f"the record is {_json_kind(record)}, not an object with the key {key!r}")
    value = record.get(key, _MISSING)
    if value is _MISSING:
        value = _nested(record, key)
    if isinstance(value, str):
        return value
    if value is _MISSING:
        keys = ", ".join(str(name) for name in sorted(record)) or "none"
        raise _BadRecordError(f"no key {key!r}; keys present: {_shortened(keys)}")
    raise _BadRecordError(f"{key!r} is {_json_kind(value)}, not text")


def _nested(record: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(record, Mapping) or part not in record:
            return _MISSING
        record = record[part]
    return record


class _SubsetReader:
    """Takes the subset name out of records; equal names are one object, so that a block is small when it is sent."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._path = key.split(".")
        self._names: dict[str, str] = {}

    def __call__(self, record: Mapping[str, Any]) -> str | None:
        value = record.get(self._key)
        if value is None:
            value = record
            for part in self._path:
                if not isinstance(value, dict) or part not in value:
                    return None
                value = value[part]
        if value.__class__ is int:
            value = str(value)
        if not isinstance(value, str) or not value:
            return None
        name = self._names.get(value)
        return self._names.setdefault(value, _LONE_SURROGATE.sub("\ufffd", value)) if name is None else name


def _without_lone_surrogates(text: str, form: RecordFormat) -> tuple[str, int]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        if not form.replaces_invalid:
            code = ord(text[error.start])
            raise _BadRecordError(
                f"the text holds the lone surrogate U+{code:04X} at character {error.start + 1}, which is no character"
            ) from None
        return _LONE_SURROGATE.subn("\ufffd", text)
    return text, 0


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {_shortened(str(value))}"
    return {"str": "text", "list": "a list", "dict": "an object"}.get(type(value).__name__, type(value).__name__)


def _shortened(text: str, length: int = 200) -> str:
    return text if len(text) <= length else text[:length] + "..."


def _parse_rows(block: RowBlock, form: RecordFormat) -> ParsedBlock:
    parsed, subset_of = ParsedBlock(block.source.name), _SubsetReader(form.subset_key)
    text_key = block.text_key or form.text_key
    has_column = text_key in block.columns or text_key.partition(".")[0] in block.columns
    offsets = block.offsets or (0,) * len(block.rows)
    for number, (row, offset) in enumerate(zip(block.rows, offsets, strict=True), block.start.line):
        if isinstance(row, Filtered):
            parsed.filtered.append((number, row.reason))
            continue
        try:
            if isinstance(row, str):
                raise _BadRecordError(row)
            if not has_column and form.turns is None:
                present = _shortened(", ".join(block.columns))
                raise _BadRecordError(f"no column {text_key!r}; columns present: {present}")
            turns, replaced = _turns_of_row(row, text_key, form)
        except _BadRecordError as error:
            parsed.rejects.append(Reject(parsed.file, number, offset, str(error)))
            continue
        text = "".join(turns)
        parsed.add(number, offset, text, subset_of(row))
        if text and form.turns is not None:
            parsed.turns.append(turns)
        if replaced:
            parsed.events.append((number, "replaced_characters", replaced))
    return parsed


def _turns_of_row(row: Any, text_key: str, form: RecordFormat) -> tuple[list[str], int]:
    value = row.get(text_key)
    if form.turns is None and isinstance(value, bytes):
        text, replaced = _decoded(value, form)
        return [text], replaced
    return (_turns_of(row, form) if form.turns is not None else [_text_of(row, text_key)]), 0


def _parse_text_lines(block: LineBlock, form: RecordFormat) -> ParsedBlock:
    parsed = ParsedBlock(block.source.name)
    offset = block.start.offset
    lines = block.data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, block.start.line):
        try:
            text, replaced = _decoded(line.removesuffix(b"\r"), form)
        except _BadRecordError as error:
            parsed.rejects.append(Reject(parsed.file, number, offset, str(error)))
        else:
            parsed.add(number, offset, "" if text.isspace() else text, None)
            if replaced:
                parsed.events.append((number, "replaced_characters", replaced))
        offset += len(line) + 1
    return parsed


def _decoded(data: bytes, form: RecordFormat) -> tuple[str, int]:
    """Return a text and the number of U+FFFD put in; a byte order mark is no part of it."""
    data = data.removeprefix(BOM)
    try:
        return data.decode("utf-8"), 0
    except UnicodeDecodeError as error:
        if not form.replaces_invalid:
            place = f"byte 0x{data[error.start]:02x} at position {error.start} of the text"
            raise _BadRecordError(f"{place} is not valid UTF-8") from None
    text = data.decode("utf-8", errors="replace")
    return text, text.count("\ufffd") - data.count("\ufffd".encode())
