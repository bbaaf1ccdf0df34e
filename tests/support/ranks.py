"""Runs a function on several gloo ranks, forked from a clean process.

The ranks are not forked from the test's process: a fork takes over the threads and locks that
earlier tests left behind, and a rank that meets a lock held by nobody waits for ever. One helper
per test session imports torch, never computes anything, and forks.
"""

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import torch


def run_on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: int = 120) -> list[Any]:
    """Call `function(*arguments)` on every rank of a fresh process group and return the results by rank.

    Raises:
        AssertionError: A rank raised or did not finish; holds its traceback.
    """
    module = sys.modules[function.__module__]
    cloudpickle.register_pickle_by_value(module)  # a test module cannot be imported by name elsewhere
    try:
        request = cloudpickle.dumps((world_size, function, arguments, timeout_s))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "request").write_bytes(request)
        helper = _helper()
        if helper.stdin is None:
            raise RuntimeError("the helper has no input")
        helper.stdin.write(f"{name}\n".encode())
        helper.stdin.flush()
        deadline = time.monotonic() + timeout_s + 10
        while not (folder / "done").exists():
            if time.monotonic() > deadline or helper.poll() is not None:
                with contextlib.suppress(OSError, ValueError):
                    os.killpg(int((folder / "pid").read_text()), signal.SIGKILL)
                raise AssertionError("\n".join([f"ranks did not finish within {timeout_s} s", *_errors(folder)]))
            time.sleep(0.01)
        if errors := _errors(folder):
            raise AssertionError("\n".join(errors))
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _errors(folder: Path) -> list[str]:
    return [text for path in sorted(folder.glob("*.error")) if (text := path.read_text())]


@functools.cache
def _helper() -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(Path(__file__).with_name("rank_helper.py"))]
    helper = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    atexit.register(helper.kill)
    return helper
