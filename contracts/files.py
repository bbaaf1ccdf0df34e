"""Writing small files so that a reader, a crash or a full disk never meets half of one."""

import contextlib
import errno
import os
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from contracts.errors import ConfigError, ShardlineError

_PROBE_BYTES = 2**18  # more than what is left where a write of blocks was cut short

_CURES = {
    errno.ENOSPC: "Free some space on that disk",
    errno.EDQUOT: "Free some space or have the quota raised",
    errno.EROFS: "It is a read-only file system; choose another --store or --output",
    errno.EACCES: "Get the right to write there, or choose another --store or --output",
    errno.EPERM: "Get the right to write there, or choose another --store or --output",
    errno.EIO: "The disk itself fails; look at the system's log",
    errno.ENOTDIR: "A file stands where a folder is needed; remove it or choose another --store or --output",
    errno.EEXIST: "A file stands where a folder is needed; remove it or choose another --store or --output",
    errno.ENAMETOOLONG: "Choose a shorter label or path",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.EFBIG: "Raise the limit on the size of a file (ulimit -f), or use a file system that holds larger ones",
    errno.ESTALE: "The network disk was mounted anew",
}


def user_path(text: str | Path) -> Path:
    """Return a path as a user wrote it, with `~` replaced.

    Raises:
        ConfigError: It begins with the home folder of somebody unknown.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{text}: no such user has a home folder here. Write the whole path.") from None


def storage_error(error: OSError, path: Path) -> ShardlineError | None:
    """Turn an error of the disk into a message with the path and the cure; None for other errors.

    Args:
        error: What the system said; the file it names is preferred to `path`.
        path: Where the work happened.
    """
    cure = _CURES.get(error.errno or 0)
    if cure is None:
        return None
    where = error.filename if isinstance(error.filename, str) else path
    return ShardlineError(
        f"{where}: {error.strerror}. {cure}, then start again; finished work is kept and goes on from there."
    )


def hidden_storage_error(error: Exception, path: Path) -> ShardlineError | None:
    """Find out whether a failure was the disk's: many libraries drop its error number when a write is cut short.

    Args:
        error: What a library raised.
        path: The folder it wrote in, where a probe is written and removed again.
    """
    if "No space left on device" in str(error):
        return storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path)
    probe = path / f"probe.{uuid.uuid4().hex[:12]}.tmp"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
    except OSError as refusal:
        return storage_error(OSError(refusal.errno, refusal.strerror), path)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn failures of the disk below `path`, also those that a library hides, into messages with the cure.

    Raises:
        ShardlineError: The disk is full, read-only or otherwise unusable.
    """
    try:
        yield
    except ShardlineError:
        raise
    except Exception as error:
        known = storage_error(error, path) if isinstance(error, OSError) else None
        if (known := known or hidden_storage_error(error, path)) is not None:
            raise known from error
        raise


def write_atomically(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Put `text` at `path` in one step: readers see the old file or the whole new one.

    Args:
        is_durable: Wait until the disk has it, so that it survives a power cut.

    Raises:
        OSError: The disk is full, read-only, or the folder is gone; `path` is as it was before.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if is_durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the disk has a file's bytes, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Iterable[Path]) -> None:
    """Wait until the disk has the bytes of many files; together they wait for few journal commits."""
    with ThreadPoolExecutor(max_workers=16) as pool:
        list(pool.map(sync, paths))


def folders_in(path: Path) -> list[str]:
    """Name the folders in a folder, sorted; none if it does not exist."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
