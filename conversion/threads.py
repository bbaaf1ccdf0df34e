"""Runs independent pieces of work on a few threads: copies, digests and comparisons leave the interpreter's lock."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

R = TypeVar("R")


def in_threads(function: Callable[..., R], *arguments: Iterable[Any], workers: int) -> Iterator[R]:
    """Yield the results of a function in the order of its arguments; after an error nothing new is started."""
    if workers == 1:
        yield from map(function, *arguments)
        return
    pool = ThreadPoolExecutor(max_workers=workers)
    try:
        yield from pool.map(function, *arguments)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
