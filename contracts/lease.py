"""A lease on a folder: one process builds in it, the others wait or learn who holds it.

The lease is the file `.lock`: made by an exclusive hard link, so that its content is there from
the first moment, and kept fresh by a heartbeat. A holder on this machine is dead when its process
is gone (pid and start time); one elsewhere is dead when its heartbeat is older than LEASE_S.
Every removal of a lock happens under an flock of the folder and looks at the lock again, so that
of two processes that see a dead holder neither removes the lock of the other.
"""

import contextlib
import errno
import fcntl
import getpass
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import LockedError
from contracts.json_text import parse_json
from contracts.progress import Progress

LOCK = ".lock"
HEARTBEAT_S = 10.0
LEASE_S = 60.0  # six missed heartbeats; a stalled network disk does not lose the lease
_POLL_S = 0.2


@dataclass(frozen=True)
class Holder:
    """Who holds a lease, and how old its last heartbeat is."""

    host: str
    pid: int
    user: str
    age_s: float
    machine: str = ""
    process_started: str = ""
    token: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}"


def lease_holder(path: Path) -> Holder | None:
    """Say who builds in the folder `path` right now, or None. A dead process of this host holds nothing."""
    holder = _read(path / LOCK, now_s=time.time())
    return holder if holder is not None and _is_alive(holder) else None


class Lease:
    """Holds the lease on a folder while a `with` block runs; makes the folder if need be.

    Args:
        path: The folder.
        name: How messages call what is built there.
        wait_s: How long to wait for another holder; 0 with SHARDLINE_NO_WAIT=1 in the environment.
    """

    def __init__(self, path: Path, *, name: str, progress: Progress, wait_s: float = 3600 * 24 * 7) -> None:
        self._path = path
        self._name = name
        self._progress = progress
        self._wait_s = 0.0 if os.environ.get("SHARDLINE_NO_WAIT", "0") not in ("", "0") else wait_s
        self._token = uuid.uuid4().hex
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        """Take the lease.

        Raises:
            LockedError: Another live process holds it and does not give it up in `wait_s`.
        """
        has_told = False
        deadline = time.monotonic() + self._wait_s
        while (holder := self._take()) is not None:
            text = f"{self._name} is being built by {holder}"
            if time.monotonic() >= deadline:
                raise LockedError(f"{text}. Wait for it, or stop it, then try again.")
            if not has_told:
                self._progress.note(f"{text}; waiting for it. (SHARDLINE_NO_WAIT=1 ends with exit code 4 instead.)")
                has_told = True
            time.sleep(_POLL_S)
        self._thread.start()
        return self

    def check(self) -> None:
        """Make sure that the lease is still held.

        Raises:
            LockedError: Another process took it over, because this one stood still for too long.
        """
        holder = _read(self._path / LOCK, now_s=time.time())
        if holder is None or holder.token != self._token:
            who = "was removed" if holder is None else f"was taken over by {holder}"
            raise LockedError(f"{self._name}: the lease of this run {who}. Start again; the work so far is kept.")

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._pid:  # a forked child leaves the block; the lease is its parent's
            return
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError), _guard(self._path):
            holder = _read(self._path / LOCK, now_s=time.time())
            if holder is not None and holder.token == self._token:
                self._sweep()
                (self._path / LOCK).unlink()

    def _sweep(self) -> None:
        """Remove what processes left that were killed while they tried to take the lease."""
        for leftover in self._path.glob(f"{LOCK}.*"):
            holder = _read(leftover, now_s=time.time())
            if holder is not None and not _is_alive(holder):
                leftover.unlink(missing_ok=True)

    def _take(self) -> Holder | None:
        """Try to take the lease; return None for success, or the live holder."""
        lock = self._path / LOCK
        while True:
            self._path.mkdir(parents=True, exist_ok=True)
            temporary = self._path / f"{LOCK}.{self._token}"
            try:
                temporary.write_text(self._record(), encoding="utf-8")
                now_s = temporary.stat().st_mtime  # the clock of the disk, which also stamps heartbeats
                if _link(temporary, lock):
                    return None
            except FileNotFoundError:
                continue  # another run refused its work and removed the empty folder at this moment
            finally:
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
            holder = _read(lock, now_s=now_s)
            if holder is not None and _is_alive(holder):
                return holder
            if holder is not None:
                self._bury(holder, now_s)

    def _bury(self, dead: Holder, now_s: float) -> None:
        """Remove the lock of a dead run, and never one that another process took since."""
        lock = self._path / LOCK
        with contextlib.suppress(FileNotFoundError), _guard(self._path):
            holder = _read(lock, now_s=now_s)
            if holder is None or holder.token != dead.token or _is_alive(holder):
                return
            # Only a file system without flock can change the lock between these lines: look once more.
            grave = self._path / f"{LOCK}.dead.{self._token}"
            lock.rename(grave)
            buried = _read(grave, now_s=now_s)
            if buried is not None and buried.token != dead.token:
                _link(grave, lock)
            grave.unlink()

    def _record(self) -> str:
        record = {
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "process_started": _process_started(os.getpid()),
            "user": user_name(),
            "token": self._token,
        }
        return json.dumps(record)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError, LockedError):
                self.check()
                os.utime(self._path / LOCK)


def user_name() -> str:
    """Name the user; containers often run under a number that has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _link(source: Path, target: Path) -> bool:
    """Give `source` the name `target` unless that is taken; True for success."""
    try:
        os.link(source, target)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EXDEV):
            raise
    # No hard links here (some FUSE and object-store mounts): exclusive creation is the next best.
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
        return True
    except FileExistsError:
        return False


@contextlib.contextmanager
def _guard(path: Path) -> Iterator[None]:
    """Let one process at a time remove locks in a folder; the kernel frees it when a process dies."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # network disks without flock: `_bury` looks twice instead
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(lock: Path, *, now_s: float) -> Holder | None:
    try:
        age_s = max(0.0, now_s - lock.stat().st_mtime)
        text = lock.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError:
        text = ""
    try:
        data = parse_json(text)
        return Holder(
            host=str(data["host"]),
            pid=int(data["pid"]),
            user=str(data["user"]),
            age_s=age_s,
            machine=str(data["machine"]),
            process_started=str(data["process_started"]),
            token=str(data["token"]),
        )
    except (ValueError, KeyError, TypeError):
        return Holder("an unknown host", 0, "an unknown user", age_s)  # damaged: only its age tells


def _is_alive(holder: Holder) -> bool:
    if not holder.machine or holder.machine != _machine():
        return holder.age_s < LEASE_S
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    started = _process_started(holder.pid)  # tells a reused pid from the old one
    return started == holder.process_started or not started or not holder.process_started


def _machine() -> str:
    """Name the set of processes whose pids this process can judge: host, boot and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return f"{socket.gethostname()}/unknown/{os.getpid()}"


def _process_started(pid: int) -> str:
    """Start time of a live process in clock ticks since boot; empty for none, dead or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[19]
