"""Runs functions in forked processes, and kills them at a chosen system call."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

# Every call by which a store changes the disk; `open` is left out, since it also reads.
CALLS = ("mkdir", "link", "rename", "replace", "unlink", "rmdir", "fsync", "utime", "truncate")


def run_forked(function: Callable[..., Any], *arguments: Any, timeout_s: float = 60) -> int:
    """Run a function in a forked process; returns its exit code, negative for a signal."""
    process = start_forked(function, *arguments)
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"{function} ran longer than {timeout_s} s.")
    return process.exitcode or 0


def start_forked(function: Callable[..., Any], *arguments: Any) -> Any:
    # Forked: a spawned process would import everything again, which costs more than the test.
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def kill_at(number: int, *, is_after: bool) -> list[str]:
    """Let this process die by SIGKILL at its n-th call that changes the disk, before or after it is done.

    Returns:
        The names of the calls so far; it grows.
    """
    seen: list[str] = []
    for name in CALLS:
        setattr(os, name, _counted(getattr(os, name), name, seen, number, is_after))
    return seen


def _counted(call: Callable[..., Any], name: str, seen: list[str], number: int, is_after: bool) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        seen.append(name)
        is_last = len(seen) == number
        if is_last and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return call(*arguments, **options)
        finally:
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)

    return counted
