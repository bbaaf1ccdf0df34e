"""Whether the ranks are alive and getting on: what a rank leaves for its launcher, and what the launcher reads of it.

A rank leaves `rank-N.pid`, `rank-N.beat` (what it is doing, written anew at every step) and, when it ends by
itself, `rank-N.ended`. On SIGUSR2 it writes the stacks of its threads to `rank-N.stacks`, in the signal handler
itself, so also inside a collective that never returns. Never imports torch.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path

from contracts.errors import ShardlineError

LOG_DIR_VARIABLE = "SHARDLINE_LOG_DIR"
STACKS_SIGNAL = signal.SIGUSR2
_AFTER_A_DEATH_S = 5.0  # what the others get to say why they failed
_STACKS_S = 5.0
_FILES = ("pid", "beat", "ended", "stacks")


class Beat:
    """A rank's sign of life; does nothing outside of a launcher."""

    def __init__(self) -> None:
        folder = os.environ.get(LOG_DIR_VARIABLE)
        path = Path(folder) / f"rank-{os.environ.get('RANK', '0')}.beat" if folder else None
        self._file = path.open("wb", buffering=0) if path is not None else None

    def __call__(self, doing: str) -> None:
        """Say what the rank does from now on, such as "training step 7"."""
        if self._file is not None:
            self._file.seek(0)
            self._file.write(doing.encode().ljust(60))


def announce(folder: Path, rank: str) -> None:
    """Leave this rank's process id, and make it write its stacks when it is asked to."""
    stacks = (folder / f"rank-{rank}.stacks").open("w", encoding="utf-8")
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")


def say_ended(folder: Path, rank: str, code: int) -> None:
    """Leave the exit code of a rank that ends by itself."""
    (folder / f"rank-{rank}.ended").write_text(str(code), encoding="utf-8")


def clear(folder: Path) -> None:
    """Remove what the ranks of an earlier start left."""
    for kind in _FILES:
        for path in folder.glob(f"rank-*.{kind}"):
            path.unlink(missing_ok=True)


class Watch:
    """The launcher's view of its ranks.

    Args:
        folder: Where the ranks leave their files.
        hang_timeout_s: Longest time in which no rank gives a sign of life; None waits for ever.
    """

    def __init__(self, folder: Path, hang_timeout_s: float | None) -> None:
        self.folder, self.hang_timeout_s = folder, hang_timeout_s
        self._started = time.time()
        self._death: float | None = None
        self._killed: list[int] = []
        self._hang: ShardlineError | None = None

    def is_over(self) -> bool:
        """Say whether the ranks must be ended: one died and the others had time to say so, or all hang."""
        now = time.time()
        if self._death is None:
            dead, failed = self._dead(), any(code != 0 for code in self._codes().values())
            if dead or failed:
                self._death = now
                # After a failure torchrun ends the other ranks, so only a death without one is the cause.
                self._killed = [] if failed else dead
        elif now - self._death > _AFTER_A_DEATH_S:
            return True
        if self.hang_timeout_s is not None and self._death is None and now - self._last_sign() > self.hang_timeout_s:
            self._hang = self._hanging(now)
            return True
        return False

    def error(self) -> ShardlineError | None:
        """Say what was seen; None where the ranks' own words say more."""
        if self._hang is not None:
            return self._hang
        ranks, how = self._killed, "was killed"
        if root := self._root_cause():
            number, code = root
            name = signal.Signals(-code).name if code < 0 and -code in set(signal.Signals) else f"exit code {code}"
            ranks, how = [number], f"was ended by {name}"
        if not ranks:
            return None
        cure = " The kernel does that when memory runs out: lower micro_batch_size, or cut the model over more ranks."
        return ShardlineError(
            f"Rank {ranks[0]} {how}{' while ' + doing if (doing := self._doing(ranks[0])) else ''}.{cure} "
            f"The other ranks were ended. See {self.folder}/rank-{ranks[0]}.log and launcher.log."
        )

    def _root_cause(self) -> tuple[int, int] | None:
        """The rank and exit code that torchrun saw first, if it was killed by a signal."""
        with contextlib.suppress(OSError):
            text = (self.folder / "launcher.log").read_text(encoding="utf-8", errors="replace")
            found = re.search(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-\d+)", text, re.DOTALL)
            if found:
                return int(found[1]), int(found[2])
        return None

    def _pids(self) -> dict[int, int]:
        return {rank: pid for rank, text in self._texts("pid") if (pid := int(text or 0))}

    def _codes(self) -> dict[int, int]:
        return {rank: int(text) for rank, text in self._texts("ended") if text}

    def _texts(self, kind: str) -> list[tuple[int, str]]:
        found = []
        for path in sorted(self.folder.glob(f"rank-*.{kind}")):
            with contextlib.suppress(OSError, ValueError):
                found.append((int(path.stem.removeprefix("rank-")), path.read_text(encoding="utf-8").strip()))
        return found

    def _dead(self) -> list[int]:
        """Ranks whose process is gone, though they did not end by themselves."""
        gone = [rank for rank, pid in self._pids().items() if not _is_alive(pid)]
        ended = self._codes()  # read after: a rank says that it ends before it does
        return [rank for rank in gone if rank not in ended]

    def _last_sign(self) -> float:
        times = [self._started]
        for path in self.folder.glob("rank-*.beat"):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def _doing(self, rank: int) -> str:
        return dict(self._texts("beat")).get(rank, "")

    def _hanging(self, now: float) -> ShardlineError:
        pids = self._pids()
        for pid in pids.values():
            with contextlib.suppress(OSError):
                os.kill(pid, STACKS_SIGNAL)
        deadline = time.monotonic() + _STACKS_S
        while time.monotonic() < deadline and not all(self._has_stacks(rank) for rank in pids):
            time.sleep(0.05)
        time.sleep(0.2)  # a stack takes some writes
        doing: dict[str, list[str]] = {}
        for rank, text in self._texts("beat"):
            doing.setdefault(text or "starting", []).append(str(rank))
        listed = "; ".join(f"rank {', '.join(ranks[:8])}: {text}" for text, ranks in doing.items())
        silent = ", ".join(str(rank) for rank in pids if not self._has_stacks(rank))
        stopped = f"Rank {silent} did not answer: it is stopped, or waits for a disk. " if silent else ""
        return ShardlineError(
            f"No rank got on for {now - self._last_sign():.0f} s (hang_timeout_s: {self.hang_timeout_s:g}), so all "
            f"were ended. They were at: {listed or 'their start'}. {stopped}What each was waiting in stands in "
            f"{self.folder}/rank-*.stacks. The same command goes on from the last checkpoint."
        )

    def _has_stacks(self, rank: int) -> bool:
        with contextlib.suppress(OSError):
            return (self.folder / f"rank-{rank}.stacks").stat().st_size > 0
        return False


def _is_alive(pid: int) -> bool:
    """Say whether a process runs; one that has ended and is not yet waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
