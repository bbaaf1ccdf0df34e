"""Starts the ranks of a job with torchrun, watches them, and leaves none behind. Never imports torch.

The ranks run in a session of their own. When the launcher is asked to stop, it first asks them to
save (a stop file), then terminates, then kills. When it is killed itself, the kernel tells them.
`python -m training.launch PARENT -- ...` is the first process of that session.
"""

import contextlib
import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from contracts.errors import ConfigError, InputError, ShardlineError
from contracts.json_text import parse_json
from training.watching import LOG_DIR_VARIABLE, Watch, announce, clear, say_ended

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
_TERMINATE_S = 35.0  # torchrun itself waits 30 s between asking its ranks to end and killing them
_RANKS_PER_CORE = 16  # a larger layout is meant for more machines, or a slip of the pen
NOTES = "notes.txt"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class _Terminated(BaseException):
    """SIGTERM, or the SIGUSR1 that cluster managers send before time is up, reached the launcher."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    nproc: int,
    log_dir: Path,
    threads_per_rank: int = 0,
    stop_file: Path | None = None,
    grace_s: float = 60.0,
    hang_timeout_s: float | None = None,
    on_poll: Callable[[], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> None:
    """Run `python -m module arguments...` on `nproc` ranks of this machine and wait for them.

    Args:
        module: Its `main` should be called through `rank_main`.
        nproc: Ranks.
        log_dir: Receives `rank-N.log` and `launcher.log`; older ones are kept as `*.log.1`.
        threads_per_rank: CPU threads of a rank; 0 shares the cores evenly.
        stop_file: Made when the launcher is interrupted, to ask the ranks to save and end.
        grace_s: Time they get for that.
        hang_timeout_s: When no rank gives a sign of life (`watching.Beat`) for so long, the stacks of all
            are written and all are ended; None waits for ever.
        on_poll: Called a few times a second while the ranks run, and once after they ended.
        on_note: Is given what ranks say with `tell`.

    Raises:
        ConfigError: There are far more ranks than this machine can carry.
        ShardlineError: A rank failed, was killed, or all hang; has its message, or its last line, and the
            log's path. The kind of error is that of the rank.
    """
    _require_cores(nproc)
    _prepare_logs(log_dir)
    if stop_file is not None:
        stop_file.unlink(missing_ok=True)
    notes = _Notes(log_dir / NOTES, on_note)
    watch = Watch(log_dir, hang_timeout_s)

    def look() -> None:
        notes.pass_on()
        if on_poll is not None:
            on_poll()

    command = [sys.executable, "-m", "training.launch", str(os.getpid()), "--standalone", "--nnodes=1"]
    command += [f"--nproc-per-node={nproc}", "-m", module, *arguments]
    with (log_dir / "launcher.log").open("wb") as log, _termination_as_exception():
        process = subprocess.Popen(
            command,
            env=_environment(nproc, threads_per_rank, log_dir),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _wait(process, watch, look, stop_file, grace_s, on_note)
    look()
    if process.returncode != 0:
        raise _failure(log_dir, process.returncode, watch)


def _require_cores(nproc: int) -> None:
    cores = len(os.sched_getaffinity(0))
    if nproc > _RANKS_PER_CORE * cores:
        raise ConfigError(
            f"The layout needs {nproc} ranks on this machine, which has {cores} core{'s'[: cores > 1]}; up to "
            f"{_RANKS_PER_CORE * cores} are started here. Lower a degree of the layout."
        )


def _wait(
    process: subprocess.Popen[bytes],
    watch: Watch,
    look: Callable[[], None],
    stop_file: Path | None,
    grace_s: float,
    on_note: Callable[[str], None] | None,
) -> None:
    """Wait for the ranks, looking at what they leave; whatever happens meanwhile, none of them is left behind."""
    try:
        while process.poll() is None and not watch.is_over():
            look()
            time.sleep(_POLL_S)
    except BaseException:
        if stop_file is not None and on_note is not None:
            on_note(f"stopping: the ranks save and end, which may take up to {grace_s:.0f} s")
        _stop(process, stop_file, grace_s)
        with contextlib.suppress(Exception):
            look()  # what the ranks said last, such as the step they saved
        raise
    finally:
        _kill_session(process)


class _Notes:
    """Passes on the lines that ranks leave with `tell`, each once."""

    def __init__(self, path: Path, on_note: Callable[[str], None] | None) -> None:
        self._path, self._on_note = path, on_note
        self._offset = 0

    def pass_on(self) -> None:
        if self._on_note is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._offset += len(whole) + 1
            for line in whole.decode("utf-8", errors="replace").splitlines():
                self._on_note(line)


def tell(text: str) -> None:
    """Say a line to the user, from a rank: it goes to the rank's log and to the progress of the stage."""
    print(text, flush=True)
    if folder := os.environ.get(LOG_DIR_VARIABLE):
        with (Path(folder) / NOTES).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


@contextlib.contextmanager
def _termination_as_exception() -> Iterator[None]:
    """Turn SIGTERM into an exception where nobody else handles it, so that the ranks can be stopped."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, _frame: FrameType | None) -> NoReturn:
        raise _Terminated(number)

    for number in STOP_SIGNALS:
        signal.signal(number, terminate)
    try:
        yield
    except _Terminated as request:
        raise SystemExit(128 + request.number) from None
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)


def _environment(nproc: int, threads_per_rank: int, log_dir: Path) -> dict[str, str]:
    threads = threads_per_rank or max(1, len(os.sched_getaffinity(0)) // nproc)
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        LOG_DIR_VARIABLE: str(log_dir.resolve()),
    }


def _prepare_logs(log_dir: Path) -> None:
    log_dir.mkdir(parents=True, exist_ok=True)
    for path in log_dir.glob("*.log"):
        path.replace(path.with_suffix(".log.1"))
    for path in (*log_dir.glob("rank-*.error.json"), log_dir / NOTES):
        path.unlink(missing_ok=True)
    clear(log_dir)


def _stop(process: subprocess.Popen[bytes], stop_file: Path | None, grace_s: float) -> None:
    if stop_file is not None:
        with contextlib.suppress(OSError):
            stop_file.touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATE_S)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the session; ranks in sessions of their own die with their parent."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failure(log_dir: Path, returncode: int, watch: Watch) -> ShardlineError:
    """Make one error of what the ranks wrote down: the user's mistakes first, then a death, then the earliest."""
    records = []
    for path in sorted(log_dir.glob("rank-*.error.json")):
        with contextlib.suppress(OSError, ValueError):
            records.append(parse_json(path.read_text(encoding="utf-8")))
    is_known = any(record["kind"] is not None for record in records)
    if not is_known and (seen := watch.error()) is not None:
        return seen
    if not records:
        how = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
        return ShardlineError(
            f"The ranks ended with {how} and left no message. The launcher's last words: "
            f"{_last_words(log_dir / 'launcher.log')}. See {log_dir}/launcher.log."
        )
    first = min(records, key=lambda record: (record["kind"] is None, record["time"]))
    kind = {"ConfigError": ConfigError, "InputError": InputError}.get(first["kind"] or "", ShardlineError)
    if first["kind"] is not None:
        return kind(first["message"])
    return ShardlineError(f"Rank {first['rank']} failed: {first['message']}. See {first['log']}.")


def _last_words(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        errors = [line for line in lines if "Error" in line and "torch.distributed" not in line]
        return (errors or [line for line in lines if line] or ["nothing"])[-1][:300].rstrip(".")
    return "nothing"


def rank_main(main: Callable[[list[str]], Any]) -> NoReturn:
    """Run a rank's program and end the process: output goes to its log, and an error is written for the launcher.

    The process ends without the interpreter's shutdown. Native threads (gloo, autograd) can abort in
    it, and then a rank that did all its work and left it on the disk would count as failed.
    """
    code = _run_rank(main)
    if folder := os.environ.get(LOG_DIR_VARIABLE):
        with contextlib.suppress(OSError):
            say_ended(Path(folder), os.environ.get("RANK", "0"), code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _run_rank(main: Callable[[list[str]], Any]) -> int:
    die_with_parent(signal.SIGKILL)
    rank = os.environ.get("RANK", "0")
    folder = os.environ.get(LOG_DIR_VARIABLE)
    log = Path(folder) / f"rank-{rank}.log" if folder else None
    if folder is not None and log is not None:
        announce(Path(folder), rank)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    try:
        main(sys.argv[1:])
    except Exception as error:
        traceback.print_exc()
        if log is not None:
            is_known = isinstance(error, ShardlineError)
            message = str(error) if is_known else f"{type(error).__name__}: {_first_line(error)}"
            kind = type(error).__name__ if is_known else None
            record = {"rank": int(rank), "kind": kind, "message": message, "log": str(log), "time": time.time()}
            log.with_suffix(".error.json").write_text(json.dumps(record), encoding="utf-8")
        return 1
    return 0


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "no message"


def die_with_parent(number: int) -> None:
    """Ask the kernel for a signal when the parent process ends, however it ends (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _run_torchrun() -> None:
    parent = int(sys.argv[1])
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # the launcher died before the line above took effect
        raise SystemExit(1)
    sys.argv = ["torchrun", *sys.argv[2:]]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_torchrun()
