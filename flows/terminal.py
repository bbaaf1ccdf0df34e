"""What a person sees while a stage works: one live bar on a terminal, rare plain lines elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

PLAIN_EVERY_S = 10.0


class TerminalProgress:
    """Draws the progress of one stage on stderr; stdout stays for results.

    Use it as a context manager, so that the bar ends in a tidy way after an error too.
    """

    def __init__(self, name: str, console: Console) -> None:
        self._name = name
        self._console = console
        self._bars = Bars(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task(name, total=None, unit="", numbers="")
        self._said = time.monotonic()

    def __enter__(self) -> "TerminalProgress":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def update(self, done: float, *, total: float | None, unit: str, **numbers: float | str) -> None:
        shown = "  ".join(f"{name} {_short(value)}" for name, value in numbers.items())
        if self._console.is_terminal:
            self._bars.update(self._task, completed=done, total=total, unit=unit, numbers=shown)
        elif time.monotonic() - self._said >= PLAIN_EVERY_S:
            self._said = time.monotonic()
            of_total = f" of {_short(total)}" if total else ""
            self._console.print(f"  {self._name}: {_short(done)}{of_total} {unit}  {shown}", highlight=False)

    def note(self, text: str) -> None:
        self._console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)


def _short(value: float | str | None) -> str:
    if isinstance(value, str) or value is None:
        return str(value or "")
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def error_console() -> Console:
    """Return the console for progress and messages: stderr."""
    return Console(stderr=True, file=sys.stderr, soft_wrap=True)
