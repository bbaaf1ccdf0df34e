"""Runs a function on several gloo ranks, forked from this process."""

import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: int = 120) -> list[Any]:
    """Call `function(*arguments)` on every rank of a fresh process group and return the results by rank.

    Ranks are forked: a spawned rank imports torch again, which costs more than the test.

    Raises:
        AssertionError: A rank raised; holds its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank_main,
            args=(world_size, _free_port(), folder, function, arguments),
            nprocs=world_size,
            join=False,
            start_method="fork",
        )
        try:
            deadline = time.monotonic() + timeout_s
            while not context.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise AssertionError(f"ranks did not finish within {timeout_s} s")
        except Exception as error:
            texts = [p.read_text() for p in sorted(Path(folder).glob("*.error"))]
            raise AssertionError("\n".join([str(error), *texts])) from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank_main(
    rank: int, world_size: int, port: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
        result = function(*arguments)
        dist.barrier()
        torch.save(result, Path(folder) / f"{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
