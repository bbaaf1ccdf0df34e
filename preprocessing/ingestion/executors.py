"""How the parts of a job are run: here, or on a Ray or Dask cluster. The bytes are the same.

Parts are done whole by worker processes where there are enough of them. Where one part is so long
that the others would wait for it, such as a single zstd stream, a reader feeds its blocks to
several workers instead.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from contracts.errors import ConfigError
from preprocessing.ingestion.encoder import make_encoder
from preprocessing.ingestion.parts import IngestJob, PartProgress, PartsAtWork, ingest_part
from preprocessing.ingestion.workers import ONE_THREAD, InProcess, Pool, Processes

TICK_S = 1.0
CONNECT_S = 10.0
UNEVENNESS = 1.5  # a part may take this much longer than an even share of the work before it is fed to several workers


@dataclass(frozen=True)
class Wave:
    """Parts that are run together.

    Args:
        parts: Numbers, the longest first.
        lanes: How many run at once; one: in this process.
        workers: Processes that encode the blocks of each running part; 0: the lane itself.
    """

    parts: tuple[int, ...]
    lanes: int
    workers: int


def schedule(sizes: Mapping[int, int], workers: int) -> list[Wave]:
    """Divide workers among parts: first the long ones, fed to several workers each, then the rest, one worker each.

    Args:
        sizes: Bytes of each part, by its number.
        workers: Processes to use; 0: this process alone.
    """
    if workers == 0:
        return [Wave(tuple(sizes), 1, 0)]
    rest = sorted(sizes, key=lambda number: (-sizes[number], number))
    total = sum(sizes.values())
    long: list[int] = []
    while rest and sizes[rest[0]] * workers > UNEVENNESS * total:
        total -= sizes[rest[0]]
        long.append(rest.pop(0))
    waves = []
    if long:
        even = sum(sizes[number] for number in long) // max(1, sizes[long[0]])
        lanes = max(1, min(len(long), even, workers))
        waves.append(Wave(tuple(long), lanes, workers // lanes))
    if rest:
        lanes = min(workers, len(rest))
        waves.append(Wave(tuple(rest), lanes, 0 if lanes > 1 else workers))
    return waves


def run_here(
    job: IngestJob, numbers: Sequence[int], *, workers: int, tell: Callable[[int, PartProgress], None]
) -> PartsAtWork:
    """Run parts in this process and its workers.

    Args:
        tell: Told of the progress of parts that run in this process.
    """
    waves = schedule({number: job.parts[number].size_bytes for number in numbers}, workers)
    if any(file.is_in_this_process_only for file in job.files):
        waves = [Wave(tuple(numbers), 1, workers)]  # read here, encoded by the workers
    for wave in waves:
        if wave.lanes == 1:
            with _pool(job, wave.workers) as pool:
                for number in wave.parts:
                    ingest_part(job, number, pool, tell=partial(tell, number))
                    yield number
        else:
            with Processes(wave.lanes, make_part_worker, (job, wave.workers)) as lanes:
                yield from lanes.completed(wave.parts, tick_s=TICK_S)


def make_part_worker(job: IngestJob, workers: int) -> Callable[[int], int]:
    """Return the function by which a worker process does whole parts; it ends when its parent is gone."""
    parent = os.getppid()
    pool = _pool(job, workers)
    pool.__enter__()

    def stop_with_parent(progress: PartProgress) -> None:
        if os.getppid() != parent:
            raise SystemExit(1)

    def run(number: int) -> int:
        ingest_part(job, number, pool, tell=stop_with_parent)
        return number

    return run


def longest_first(job: IngestJob, numbers: Sequence[int]) -> list[int]:
    """Order parts so that none that is long is begun last."""
    return sorted(numbers, key=lambda number: (-job.parts[number].size_bytes, number))


def run_part(job: IngestJob, number: int) -> int:
    """Do one part in this process, with one thread: the task of a cluster."""
    for name, value in ONE_THREAD.items():
        os.environ.setdefault(name, value)
    with _pool(job, 0) as pool:
        ingest_part(job, number, pool)
    return number


def refuse_silent_cluster(address: str, name: str) -> None:
    """Make sure that something listens at the address of a cluster: its own client may try for many minutes.

    Args:
        address: With a port, as in ray://head:10001; one without, such as "auto", is left to the client.

    Raises:
        ConfigError: Nothing answers.
    """
    host, _, port = address.rpartition("://")[2].rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ingest.cluster ({address}): {name} cannot be reached ({error}). Check the address, and that it runs."
        ) from error


def _pool(job: IngestJob, workers: int) -> Pool:
    if workers:
        return Processes(workers, make_encoder, (job.encoding,))
    return InProcess(make_encoder, (job.encoding,))
