"""Artifacts outside the store's folder: a store remembers what was built with `--output`.

`<store>/.outputs.jsonl` has one JSON object per line: {"kind", "path"}. So `lineage --down`,
`lineage sync` and `status` see them too; a folder that is gone is passed over.
"""

import fcntl
import json
from pathlib import Path

from contracts.json_text import parse_json

OUTPUTS = ".outputs.jsonl"


def remember_output(root: Path, kind: str, path: Path) -> None:
    """Note that an artifact of `kind` is built in the folder `path`; a second time changes nothing."""
    entry = (kind, path.resolve())
    if entry in outputs_of(root):
        return
    root.mkdir(parents=True, exist_ok=True)
    with (root / OUTPUTS).open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps({"kind": kind, "path": str(entry[1])}) + "\n")


def outputs_of(root: Path) -> list[tuple[str, Path]]:
    """Return kind and folder of each artifact that was built outside and still stands; damaged lines are skipped."""
    try:
        lines = (root / OUTPUTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: dict[Path, str] = {}
    for line in lines:
        try:
            entry = parse_json(line)
            found[Path(str(entry["path"]))] = str(entry["kind"])
        except (ValueError, KeyError, TypeError):
            continue
    return [(kind, path) for path, kind in found.items() if path.is_dir()]
