"""Where an artifact comes from and what was made of it: a walk over manifests, nothing else."""

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

from contracts.artifact import Artifact, InputEntry
from contracts.fingerprint import SHORT_HEX
from contracts.store import ArtifactStore

MAX_RAW = 3  # raw files named in one line


class Relative(NamedTuple):
    """One artifact above or below another.

    Attributes:
        depth: Steps away, 1 for a direct input or user.
        name: Name of the input that links it to the artifact one step nearer.
        item: The artifact, or what a manifest says of an input that is gone.
        is_repeated: It stands in the list already; its own relatives are listed there.
    """

    depth: int
    name: str
    item: Artifact | InputEntry
    is_repeated: bool = False


def ancestors(store: ArtifactStore, artifact: Artifact) -> list[Relative]:
    """List all that went into an artifact, each followed by what went into it."""
    found: list[Relative] = []
    seen: set[str] = set()

    def walk(user: Artifact, depth: int) -> None:
        for name, entry in sorted(user.manifest.inputs.items()):
            item = store.input_artifact(entry)
            found.append(Relative(depth, name, item or entry, entry.fingerprint in seen))
            if item is not None and entry.fingerprint not in seen:
                seen.add(entry.fingerprint)
                walk(item, depth + 1)

    walk(artifact, 1)
    return found


def descendants(store: ArtifactStore, artifact: Artifact) -> list[Relative]:
    """List all in the store that was made of an artifact, each followed by what was made of it."""
    users: dict[str, list[tuple[str, Artifact]]] = {}
    for item in store.artifacts():
        for name, entry in item.manifest.inputs.items():
            users.setdefault(entry.fingerprint, []).append((name, item))
    found: list[Relative] = []
    seen: set[str] = set()

    def walk(source: Artifact, depth: int) -> None:
        for name, item in users.get(source.fingerprint, []):
            found.append(Relative(depth, name, item, item.fingerprint in seen))
            if item.fingerprint not in seen:
                seen.add(item.fingerprint)
                walk(item, depth + 1)

    walk(artifact, 1)
    return found


def as_text(artifact: Artifact, relatives: Sequence[Relative]) -> str:
    """Draw a lineage as a tree of lines."""
    lines = [describe(artifact)]
    for n, relative in enumerate(relatives):
        stem = "".join("│  " if _goes_on(relatives, n, depth) else "   " for depth in range(1, relative.depth))
        branch = "├─ " if _goes_on(relatives, n, relative.depth) else "└─ "
        again = "  (see above)" if relative.is_repeated else ""
        lines.append(f"{stem}{branch}{relative.name}: {describe(relative.item)}{again}")
    return "\n".join(lines)


def _goes_on(relatives: Sequence[Relative], position: int, depth: int) -> bool:
    """Tell whether another branch of `depth` follows before the tree returns above it."""
    for later in relatives[position + 1 :]:
        if later.depth <= depth:
            return later.depth == depth
    return False


def describe(item: Artifact | InputEntry) -> str:
    """Name an artifact in one line: kind, name, and a few numbers of its summary."""
    if isinstance(item, InputEntry):
        return f"{item.kind} {item.fingerprint[:SHORT_HEX]} (gone; it was at {item.path})"
    numbers = [f"{key} {_short(value)}" for key, value in item.summary.items() if _is_number(value)]
    shown = f"{item.kind}/{item.name}" + (f"  [{', '.join(numbers[:4])}]" if numbers else "")
    raw = list(item.manifest.recipe.raw)
    if not raw:
        return shown
    more = f" and {len(raw) - MAX_RAW} more" if len(raw) > MAX_RAW else ""
    return f"{shown}  from {', '.join(raw[:MAX_RAW])}{more}"


def as_data(artifact: Artifact, relatives: Sequence[Relative]) -> dict[str, Any]:
    """Give a lineage as plain data, for `--json`."""
    return {
        "artifact": _facts(artifact),
        "relatives": [
            {"depth": r.depth, "input": r.name, "is_repeated": r.is_repeated, **_facts(r.item)} for r in relatives
        ],
    }


def _facts(item: Artifact | InputEntry) -> dict[str, Any]:
    if isinstance(item, InputEntry):
        return {"kind": item.kind, "fingerprint": item.fingerprint, "path": item.path, "is_missing": True}
    return {
        "kind": item.kind,
        "fingerprint": item.fingerprint,
        "name": item.name,
        "path": str(item.path),
        "content": item.manifest.content,
        "summary": dict(item.summary),
    }


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
ul{list-style:none;border-left:1px solid #ccc;margin:0 0 0 .6em;padding-left:1.2em}
summary{cursor:pointer;padding:.15em 0} code{color:#555} table{border-collapse:collapse;margin:.3em 0 .8em}
td{border:1px solid #ddd;padding:.1em .6em;font-size:13px;vertical-align:top} .gone{color:#a00}
"""


def as_html(artifact: Artifact, *, up: Sequence[Relative] = (), down: Sequence[Relative] = ()) -> str:
    """Draw a lineage as one HTML page that needs no other file and no network."""
    title = f"Lineage of {artifact.kind}/{artifact.name}"
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>",
        _node("", artifact),
    ]
    if up:
        parts.append("<h2>Made of</h2>" + _branches(up))
    if down:
        parts.append("<h2>Used by</h2>" + _branches(down))
    return "".join(parts) + "</html>\n"


def _branches(relatives: Sequence[Relative]) -> str:
    parts: list[str] = []
    depth = 0
    for relative in relatives:
        if relative.depth > depth:
            parts.append("<ul>" * (relative.depth - depth))
        else:
            parts.append("</li>" + "</ul></li>" * (depth - relative.depth))
        depth = relative.depth
        parts.append("<li>" + _node(relative.name, relative.item, is_repeated=relative.is_repeated))
    return "".join(parts) + "</li></ul>" * depth


def _node(name: str, item: Artifact | InputEntry, *, is_repeated: bool = False) -> str:
    prefix = f"{html.escape(name)}: " if name else ""
    if isinstance(item, InputEntry):
        return f'<span class="gone">{prefix}{html.escape(describe(item))}</span>'
    text = f"{prefix}<b>{html.escape(item.kind)}/{html.escape(item.manifest.label)}</b> <code>{item.fingerprint}</code>"
    if is_repeated:
        return f"{text} (see above)"
    rows = {
        "stage": f"{item.manifest.recipe.stage}, version {item.manifest.recipe.stage_version}",
        "path": str(item.path),
        "content": item.manifest.content,
        **{f"summary: {key}": str(value) for key, value in item.summary.items()},
        **{f"made: {key}": str(value) for key, value in item.manifest.provenance.items() if key in _MADE},
    }
    table = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in rows.items())
    return f"<details><summary>{text}</summary><table>{table}</table></details>"


_MADE = ("commit", "host", "user", "seconds")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
