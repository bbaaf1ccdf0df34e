"""The clean process that `ranks.py` forks from: reads folders of requests from its input."""

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.multiprocessing as mp


def main() -> None:
    """Fork one process per request; it runs the ranks and says when they are done."""
    for line in sys.stdin:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            os.setpgid(0, 0)
            run_request(Path(line.strip()))
            os._exit(0)


def run_request(folder: Path) -> None:
    """Run the ranks of one request."""
    (folder / "pid").write_text(str(os.getpid()))
    try:
        world_size, function, arguments, timeout_s = pickle.loads((folder / "request").read_bytes())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        details = (world_size, port, folder, function, arguments, timeout_s)
        context = mp.start_processes(run_rank, args=details, nprocs=world_size, join=False, start_method="fork")
        deadline = time.monotonic() + timeout_s
        while not context.join(timeout=0.2):
            if time.monotonic() > deadline:
                (folder / "late.error").write_text(f"ranks did not finish within {timeout_s} s")
                for process in context.processes:
                    process.kill()
                break
    except BaseException as error:
        if not list(folder.glob("*.error")):
            (folder / "request.error").write_text(f"{error}\n{traceback.format_exc()}")
    (folder / "done").touch()


def run_rank(
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout_s: int,
) -> None:
    """Join the process group, call the function, leave its result."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    try:
        with (folder / f"{rank}.error").open("w") as stacks:
            faulthandler.dump_traceback_later(max(1, timeout_s - 10), file=stacks)  # where a rank hangs
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
            result = function(*arguments)
            dist.barrier()
            torch.save(result, folder / f"{rank}.pt")
            dist.destroy_process_group()
            faulthandler.cancel_dump_traceback_later()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise


if __name__ == "__main__":
    main()
