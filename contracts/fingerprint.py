"""Identity of an artifact: a recipe, its canonical JSON, and the fingerprint made of it.

Two artifacts with one fingerprint were made by the same stage version from the same inputs with
settings that lead to the same result. Provenance (commit, host, versions) is no part of it.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FINGERPRINT_HEX = 32  # fits MLflow's 36-character dataset digest
SHORT_HEX = 12


@dataclass(frozen=True)
class Recipe:
    """All that decides the content of an artifact.

    Args:
        stage: Name of the stage, such as "ingest".
        stage_version: Integer bumped by hand when the stage's code changes its result.
        config: Identity part of the settings (`configuration.identity`).
        inputs: Name of each input artifact to its fingerprint.
        raw: Name of each raw input (a file outside the store) to its content digest.
    """

    stage: str
    stage_version: int
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    raw: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """First 32 hex digits of the sha256 of the canonical JSON of the recipe."""
        return hashlib.sha256(canonical_json(self.as_dict()).encode()).hexdigest()[:FINGERPRINT_HEX]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def canonical_json(value: Any) -> str:
    """Write `value` so that equal values give equal text: sorted keys, no spaces, no NaN.

    Raises:
        ValueError: A number is NaN or infinite, or a type has no JSON form.
    """
    return json.dumps(_plain(value, "$"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; only text keys have a canonical form.")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{n}]") for n, item in enumerate(value)]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}, which has no canonical JSON form.")
        # 1.0 and 1 mean the same to every setting; YAML writers mix them.
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if value is None or isinstance(value, bool | int | str):
        return value
    raise ValueError(f"{where} is a {type(value).__name__}, which has no canonical JSON form.")
