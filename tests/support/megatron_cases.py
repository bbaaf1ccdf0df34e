"""The arrays that Megatron-LM made, from this repository or, all of them, from SHARDLINE_FIXTURES."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

SMALL = Path(__file__).parent.parent / "cases" / "megatron_index"


def roots() -> list[Path]:
    """Folders of fixtures: the small copy, and the whole set where the environment names it."""
    whole = os.environ.get("SHARDLINE_FIXTURES")
    return [SMALL, *([Path(whole) / "megatron_index"] if whole else [])]


def cases(group: str) -> list[tuple[Path, dict[str, Any]]]:
    """The cases of a group ("gpt", "blend_full") that are present, each with its fixture folder."""
    return [
        (root, case)
        for root in roots()
        for case in json.loads((root / "cases.json").read_text(encoding="utf-8"))[group]
        if (root / group / case["name"]).is_dir()
    ]


def case_ids(group: str) -> list[str]:
    return [f"{case['name']}{'' if root == SMALL else '-all'}" for root, case in cases(group)]


def assert_same_array(found: Path, wanted: Path) -> None:
    """Two .npy files hold the same bits."""
    a, b = np.load(found), np.load(wanted)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)
