"""A rank that does what its argument says: `python -m launched_rank MODE`; no torch.distributed in it."""

import atexit
import os
import signal
import time
from pathlib import Path

from contracts.errors import ConfigError
from training.launch import rank_main, tell
from training.watching import Beat


def main(arguments: list[str]) -> None:
    mode, folder = arguments
    rank = int(os.environ["RANK"])
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    if mode.endswith(", deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            (Path(folder) / "gone").touch()
            mode = mode.removesuffix(", deaf")
        else:
            time.sleep(600)
    if mode == "hang in a step":
        beat = Beat()
        beat(f"training step {3 - rank}")
        wait_for_ever()
    if mode == "slow":
        beat = Beat()
        for step in range(12):
            beat(f"training step {step}")
            time.sleep(0.9)
    if mode == "config" and rank == 1:
        raise ConfigError("layout.tensor_parallel is wrong. Use 2.")
    if mode == "crash" and rank == 1:
        raise RuntimeError("the disk is full\nmore words")
    if mode == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "abort at exit":
        atexit.register(os.abort)
    if mode == "environment":
        names = ("PYTHONSAFEPATH", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
        (Path(folder) / f"environment-{rank}").write_text(" ".join(os.environ[name] for name in names))
    if mode == "tell" and rank == 0:
        tell("the first note")
        tell("the second note")
    if mode == "wait":
        stop = Path(folder) / "stop"
        while not stop.exists():
            time.sleep(0.05)
        (Path(folder) / f"stopped-{rank}").touch()
    if mode in ("hang", "config", "crash", "kill"):
        time.sleep(600)


def wait_for_ever() -> None:
    time.sleep(600)


if __name__ == "__main__":
    rank_main(main)
