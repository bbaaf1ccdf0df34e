"""What is being built in a store right now, read from leases and progress files."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from contracts.store import ArtifactStore


def observe(store: ArtifactStore) -> list[dict[str, Any]]:
    """Return one entry per unfinished build: where, who, how far, and since when it has not moved."""
    return [
        {
            "artifact": f"{build.kind}/{build.path.name}",
            "path": str(build.path),
            "state": "running" if build.holder is not None else "interrupted",
            "who": str(build.holder) if build.holder is not None else None,
            **_progress(build.progress),
        }
        for build in store.builds()
    ]


def _progress(report: Mapping[str, Any]) -> dict[str, Any]:
    try:
        done, total, at = report["done"], report["total"], report["time"]
        first_done, first_at = report["first_done"], report["first_time"]
    except KeyError:
        return {}
    # From the first report on: the time to start ranks is not spread over the steps.
    is_moving = total and done > first_done and at > first_at
    left_s = (at - first_at) * (total - done) / (done - first_done) if is_moving else None
    return {
        "done": done,
        "total": total,
        "unit": report.get("unit", ""),
        "numbers": report.get("numbers", {}),
        "left_s": left_s,
        "age_s": time.time() - at,
    }


def describe(builds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write the entries of `observe` as lines for a person."""
    lines = []
    for build in builds:
        line = f"{build['artifact']:<44} {build['state']}"
        if build.get("done") is not None:
            of_total = f" of {build['total']:g}" if build.get("total") else ""
            line += f"  {build['done']:g}{of_total} {build['unit']}"
            line += "".join(f"  {key} {_short(value)}" for key, value in build["numbers"].items())
        if build["state"] == "running" and build.get("left_s") is not None:
            line += f"  about {_duration(build['left_s'])} left"
        if build.get("age_s") is not None:
            line += f"  (last report {_duration(build['age_s'])} ago)"
        lines.append(line + (f"  {build['who']}" if build["who"] else ""))
    return lines


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
