"""Worker processes that hand back results, in the order of the tasks or as they come.

Each is a fresh Python with one thread, spoken to by pickles over its pipes. It ends when the pipe
closes, so that none outlives its parent, kill -9 included.
"""

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import Full, Queue, SimpleQueue
from types import TracebackType
from typing import IO, Any, Protocol, Self

from contracts.errors import InputError

_LENGTH = struct.Struct("<Q")
ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",
}


class Pool(Protocol):
    """Applies a function to tasks and yields the results in the order of the tasks."""

    def ordered(self, tasks: Iterable[Any]) -> Generator[Any, None, None]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...


class InProcess:
    """Runs tasks in this process, for little work: a new process costs about 0.3 s.

    Args:
        make: Called once with `arguments`; returns the function applied to each task.
    """

    def __init__(self, make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
        self._apply = make(*arguments)

    def ordered(self, tasks: Iterable[Any]) -> Generator[Any, None, None]:
        yield from map(self._apply, tasks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        return None


class Processes:
    """Runs tasks in worker processes; at most two tasks a worker are under way at once.

    Args:
        make: A module-level function; each worker calls it once with `arguments`.
    """

    def __init__(self, num_workers: int, make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
        self._num_workers = num_workers
        self._setup = (make, arguments)
        self._all: list[subprocess.Popen[bytes]] = []
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="worker")

    def __enter__(self) -> Self:
        root = Path(__file__).resolve().parent.parent.parent
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": path}
        for _ in range(self._num_workers):
            worker = subprocess.Popen(
                [sys.executable, "-m", "preprocessing.ingestion.workers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            self._all.append(worker)
            _send(_pipe(worker.stdin), self._setup)
            self._idle.put(worker)
        return self

    def ordered(self, tasks: Iterable[Any]) -> Generator[Any, None, None]:
        """Yield results in the order of `tasks`, which a thread reads no further ahead than needed.

        Raises:
            InputError: A worker process died, as when memory ran out.
        """
        waiting: deque[Future[Any]] = deque()
        with contextlib.closing(_read_ahead(tasks, size=2)) as ready:
            for task in ready:
                waiting.append(self._threads.submit(self._ask, task))
                if len(waiting) >= 2 * self._num_workers:
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def completed(self, tasks: Iterable[Any], *, tick_s: float) -> Generator[Any, None, None]:
        """Yield results as they come, and None whenever none came for `tick_s` seconds.

        Raises:
            InputError: A worker process died.
        """
        waiting = {self._threads.submit(self._ask, task) for task in tasks}
        while waiting:
            done, waiting = wait(waiting, timeout=tick_s, return_when=FIRST_COMPLETED)
            yield from [future.result() for future in done] or [None]

    def _ask(self, task: Any) -> Any:
        worker = self._idle.get()
        try:
            _send(_pipe(worker.stdin), task)
            is_good, result = _receive(_pipe(worker.stdout))
        except (EOFError, BrokenPipeError):
            code = worker.wait()
            raise InputError(
                f"a worker process ended with code {code} (-9: killed, often for memory). "
                "Try fewer workers; a resumed run goes on at the last finished shard."
            ) from None
        finally:
            self._idle.put(worker)
        if not is_good:
            raise result
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for worker in self._all:
                worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            with contextlib.suppress(OSError):  # what was still to be sent to a dead worker
                _pipe(worker.stdin).close()
            _pipe(worker.stdout).close()
            worker.wait()


_END = object()


def _read_ahead(items: Iterable[Any], *, size: int) -> Generator[Any, None, None]:
    """Yield what `items` gives, taken by a thread that is at most `size` items ahead."""
    ready: Queue[tuple[Any, BaseException | None]] = Queue(size)
    is_over = threading.Event()

    def put(item: Any, error: BaseException | None = None) -> None:
        while not is_over.is_set():
            with contextlib.suppress(Full):
                ready.put((item, error), timeout=0.1)
                return

    def read() -> None:
        try:
            for item in items:
                put(item)
                if is_over.is_set():
                    return
            put(_END)
        except BaseException as error:  # raised where the items are used
            put(_END, error)

    thread = threading.Thread(target=read, name="reader", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        is_over.set()
        thread.join()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise RuntimeError("the worker was started without pipes")
    return pipe


def _send(pipe: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


def _serve() -> None:
    """Answer tasks from stdin until it closes."""
    # Only answers may go to the pipe: what a library prints goes to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    tasks = sys.stdin.buffer
    try:
        make, arguments = _receive(tasks)
        apply = make(*arguments)
        while True:
            task = _receive(tasks)
            try:
                answer: tuple[bool, Any] = (True, apply(task))
            except Exception as error:
                answer = (False, error)
            _send(answers, answer)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


if __name__ == "__main__":
    _serve()
