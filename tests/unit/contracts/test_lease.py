import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from contracts.errors import LockedError
from contracts.lease import LEASE_S, LOCK, Lease, _machine, _process_started, lease_holder
from contracts.progress import SilentProgress


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def lease_on(path: Path, **options: float) -> Lease:
    return Lease(path, name="dataset/pile", progress=SilentProgress(), **options)


def leave_lock(path: Path, *, pid: int, started: str, machine: str = "", age_s: float = 0.0) -> None:
    record = {
        "host": socket.gethostname(),
        "machine": machine or _machine(),
        "pid": pid,
        "process_started": started,
        "user": "ada",
        "token": "t",
    }
    (path / LOCK).write_text(json.dumps(record))
    os.utime(path / LOCK, (time.time() - age_s,) * 2)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_lease_is_held_in_the_block_and_gone_after_it(tmp_path: Path):
    with lease_on(tmp_path):
        holder = lease_holder(tmp_path)
        assert holder is not None
        assert holder.pid == os.getpid()

    assert lease_holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_is_told_who_holds_it(tmp_path: Path):
    with lease_on(tmp_path), pytest.raises(LockedError) as caught, lease_on(tmp_path, wait_s=0):
        pass

    assert caught.value.exit_code == 4
    assert f"dataset/pile is being built by process {os.getpid()} of " in str(caught.value)
    assert socket.gethostname() in str(caught.value)


def test_the_environment_makes_a_locked_run_end_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHARDLINE_NO_WAIT", "1")

    with lease_on(tmp_path), pytest.raises(LockedError), lease_on(tmp_path):
        pass


def test_a_run_that_waits_says_so_once_and_then_gets_the_lease(tmp_path: Path):
    notes = Notes()
    first = lease_on(tmp_path)
    first.__enter__()
    threading.Timer(0.5, lambda: first.__exit__(None, None, None)).start()

    with Lease(tmp_path, name="dataset/pile", progress=notes):
        pass

    assert len(notes.texts) == 1
    assert "waiting for it" in notes.texts[0]


def test_the_lease_of_a_killed_process_passes_on_at_once(tmp_path: Path):
    leave_lock(tmp_path, pid=dead_pid(), started="1")

    with lease_on(tmp_path, wait_s=0):
        assert lease_holder(tmp_path).pid == os.getpid()


def test_a_pid_that_another_process_has_now_holds_nothing(tmp_path: Path):
    leave_lock(tmp_path, pid=os.getpid(), started="1")

    assert lease_holder(tmp_path) is None


def test_a_holder_on_another_machine_lives_as_long_as_its_heartbeat(tmp_path: Path):
    leave_lock(tmp_path, pid=1, started="1", machine="elsewhere", age_s=LEASE_S / 2)
    assert lease_holder(tmp_path) is not None

    leave_lock(tmp_path, pid=1, started="1", machine="elsewhere", age_s=LEASE_S * 2)
    assert lease_holder(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}'])
def test_a_damaged_lock_counts_by_its_age(tmp_path: Path, text: str):
    (tmp_path / LOCK).write_text(text)
    assert lease_holder(tmp_path) is not None

    os.utime(tmp_path / LOCK, (1, 1))
    with lease_on(tmp_path, wait_s=0):
        pass


def test_a_run_that_lost_its_lease_notices(tmp_path: Path):
    with lease_on(tmp_path) as lease:
        leave_lock(tmp_path, pid=os.getpid(), started=_process_started(os.getpid()))
        with pytest.raises(LockedError, match="taken over by process"):
            lease.check()

    assert (tmp_path / LOCK).exists(), "the lock of the other run must stay"


def test_works_where_hard_links_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)

    with lease_on(tmp_path), pytest.raises(LockedError), lease_on(tmp_path, wait_s=0):
        pass


def test_the_heartbeat_keeps_a_lease_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("contracts.lease.HEARTBEAT_S", 0.02)

    with lease_on(tmp_path):
        os.utime(tmp_path / LOCK, (1, 1))
        deadline = time.monotonic() + 5
        while lease_holder(tmp_path).age_s > 60:
            assert time.monotonic() < deadline
            time.sleep(0.01)
