"""Tasks for worker processes under test."""

import os
import signal
import time
from collections.abc import Callable

from contracts.errors import RecordError


def make_task(prefix: str) -> Callable[[object], str]:
    """Return a function that answers numbers, fails at "bad" and dies at "die"."""

    def apply(task: object) -> str:
        if task == "bad":
            raise RecordError("f", 7, "why")
        if task == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == 1:
            time.sleep(0.1)  # answers of later tasks are ready first
        return f"{prefix}{task}"

    return apply
