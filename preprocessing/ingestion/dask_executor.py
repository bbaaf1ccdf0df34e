"""Parts on a Dask cluster: one task each, by `distributed`.

All machines see the sources, the store and the output under the same paths. Give the cluster's
workers one thread each. This module owns `distributed`.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from contracts.errors import ConfigError, InputError
from preprocessing.ingestion.executors import TICK_S, longest_first, refuse_silent_cluster, run_part
from preprocessing.ingestion.parts import IngestJob, PartsAtWork


def run_on_dask(job: IngestJob, numbers: Sequence[int], *, cluster: str | None, workers: int | None) -> PartsAtWork:
    """Do parts as tasks of a cluster; yield each when it is done, and None every second or so.

    Args:
        cluster: Address of its scheduler; None: worker processes of this machine, for as long as this takes.
        workers: Processes of a cluster of this machine; None: one per core.

    Raises:
        ConfigError: Dask is not installed, or the cluster does not answer.
        InputError: A task's process died.
    """
    distributed = _distributed()
    with _client(distributed, cluster, workers) as client:
        shared = client.scatter(job, broadcast=True, hash=False)
        order = longest_first(job, numbers)
        # Earlier futures have a higher priority; none is tried again, since a resumed run goes on instead.
        futures = {client.submit(run_part, shared, number, pure=False, retries=0): number for number in order}
        try:
            while futures:
                done = _finished(distributed, list(futures))
                for future in done:
                    del futures[future]
                    yield _result(distributed, future)
                if not done:
                    yield None
        finally:
            client.cancel(list(futures), force=True)


def _distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise ConfigError("ingest.executor is dask, which is not installed. Install shardline[dask].") from error
    return distributed


@contextlib.contextmanager
def _client(distributed: Any, cluster: str | None, workers: int | None) -> Iterator[Any]:
    if cluster is not None:
        refuse_silent_cluster(cluster, "Dask")
    with contextlib.ExitStack() as stack:
        where: Any = cluster
        if cluster is None:
            where = stack.enter_context(
                distributed.LocalCluster(
                    n_workers=workers or len(os.sched_getaffinity(0)),
                    threads_per_worker=1,
                    memory_limit=0,
                    dashboard_address=None,
                    silence_logs="CRITICAL",
                )
            )
        try:
            client = stack.enter_context(distributed.Client(where, timeout="30s"))
        except (OSError, ValueError) as error:  # its time-outs are OSErrors
            raise ConfigError(
                f"ingest.cluster ({cluster}): Dask cannot be reached ({error}). Check the address, and that it runs."
            ) from error
        yield client


def _finished(distributed: Any, futures: list[Any]) -> list[Any]:
    try:
        return list(distributed.wait(futures, timeout=TICK_S, return_when="FIRST_COMPLETED").done)
    except TimeoutError:
        return []


def _result(distributed: Any, future: Any) -> int:
    try:
        number: int = future.result()
    except distributed.KilledWorker as error:
        raise InputError(
            f"a Dask worker died ({error}); often memory ran out. "
            "Start again: a resumed run goes on at the last finished shards."
        ) from error
    return number
