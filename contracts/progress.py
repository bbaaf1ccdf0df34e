"""How long work reports how far it is. Stages call it; the command line and Prefect draw it."""

from typing import Protocol


class Progress(Protocol):
    """Where a stage reports how far it is. Calls are cheap; the receiver limits its own rate."""

    def update(self, done: float, *, total: float | None, unit: str, **numbers: float | str) -> None:
        """Say that `done` of `total` units are finished; `numbers` are shown beside the bar."""

    def note(self, text: str) -> None:
        """Show one line to the user, such as a warning or a path to look at."""


class SilentProgress:
    """Throws reports away."""

    def update(self, done: float, *, total: float | None, unit: str, **numbers: float | str) -> None:
        return None

    def note(self, text: str) -> None:
        return None
