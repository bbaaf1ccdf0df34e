"""One self-contained HTML page: tables and pictures, no other file and no script."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.artifact import Artifact

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:68em;margin:2em auto;padding:0 1em;color:#1f2933}
table{border-collapse:collapse;margin:.6em 0;font-size:14px}
th,td{border-bottom:1px solid #e4e7eb;padding:.25em .8em;text-align:left;vertical-align:top}
img{max-width:100%;border:1px solid #e4e7eb} .how{color:#52606d;font-size:13px} code{color:#52606d}
pre{white-space:pre-wrap;background:#f5f7fa;padding:.6em;font-size:13px}
"""


def page(title: str, about: str, body: Sequence[str], made_of: Mapping[str, Artifact]) -> str:
    """Return the page.

    Args:
        body: HTML, in order.
        made_of: Artifacts to name at the end.
    """
    rows = [[name, item.name, item.fingerprint] for name, item in made_of.items()]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><p>{html.escape(about)}</p>{''.join(body)}"
        f"<h2>Made of</h2>{table(['input', 'artifact', 'fingerprint'], rows)}</html>\n"
    )


def number(value: Any) -> str:
    """Write a number for a person; "-" where there is none."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts."""
    top = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def image(name: str, path: Path) -> str:
    """Return a heading and a picture that is part of the page."""
    title, data = html.escape(name), base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{data}">'
