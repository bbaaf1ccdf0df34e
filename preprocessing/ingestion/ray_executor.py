"""Parts on a Ray cluster: one task each, on one core.

All machines see the sources, the store and the output under the same paths. This module owns `ray`.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from contracts.errors import ConfigError, InputError
from preprocessing.ingestion.executors import TICK_S, longest_first, refuse_silent_cluster, run_part
from preprocessing.ingestion.parts import IngestJob, PartsAtWork


def run_on_ray(job: IngestJob, numbers: Sequence[int], *, cluster: str | None, workers: int | None) -> PartsAtWork:
    """Do parts as tasks of a cluster; yield each when it is done, and None every second or so.

    Args:
        cluster: Its address; None: a cluster of this machine, for as long as this takes.
        workers: Tasks at once; None: as many as the cluster has cores.

    Raises:
        ConfigError: Ray is not installed, or the cluster does not answer.
        InputError: A task's process died.
    """
    ray = _ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        _connect(ray, cluster, workers)
    running: dict[Any, int] = {}
    try:
        task = ray.remote(num_cpus=1, max_retries=0)(run_part)
        shared = ray.put(job)
        waiting = deque(longest_first(job, numbers))
        while waiting or running:
            while waiting and (workers is None or len(running) < workers):
                number = waiting.popleft()
                running[task.remote(shared, number)] = number
            done, _ = ray.wait(list(running), timeout=TICK_S)
            for reference in done:
                del running[reference]
                yield _result(ray, reference)
            if not done:
                yield None
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        if is_ours:
            ray.shutdown()


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("ingest.executor is ray, which is not installed. Install shardline[ray].") from error
    return ray


def _connect(ray: Any, cluster: str | None, workers: int | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if cluster is None:
        options |= {"address": "local", "num_cpus": workers, "include_dashboard": False}
    else:
        refuse_silent_cluster(cluster, "Ray")
        options["address"] = cluster
    try:
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(**options)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray puts its own in the way of ours
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        where = f"ingest.cluster ({cluster})" if cluster else "a Ray cluster on this machine"
        raise ConfigError(f"{where}: Ray cannot be reached ({error}). Check the address, and that it runs.") from error


def _result(ray: Any, reference: Any) -> int:
    try:
        number: int = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise InputError(
            f"a Ray task ended without a result ({error}); often memory ran out. "
            "Start again: a resumed run goes on at the last finished shards."
        ) from error
    return number
