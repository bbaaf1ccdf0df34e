"""Files elsewhere (s3://, gs://, https://, memory:// ...), through `fsspec`, which this module owns.

Credentials and endpoints are those of the file system's own package, as in AWS_PROFILE or
FSSPEC_S3_ENDPOINT_URL. Nothing is downloaded to be digested: a file is known by what its server
says of it.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from contracts.errors import ConfigError

BLOCK_BYTES = 8 * 2**20  # of one request
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http"}
_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated")
# What servers call the fingerprint of a file's bytes.
_FINGERPRINTS = ("ETag", "etag", "md5Hash", "md5", "content_md5", "crc32c", "sha256", "checksum")


@dataclass(frozen=True)
class RemoteFile:
    """A file as its server lists it; `path` is below the folder or glob that was asked for."""

    path: str
    url: str
    size_bytes: int


def is_url(source: str) -> bool:
    """Tell an address from a path of this machine."""
    scheme, separator, _ = source.partition("://")
    return bool(separator) and scheme.replace("+", "").replace(".", "").isalnum() and scheme != "file"


def list_remote(url: str) -> list[RemoteFile]:
    """List the file, the files of the folder, or the files of the glob at `url`, by name.

    Raises:
        ConfigError: The server cannot be asked, its package is absent, or there is nothing.
    """
    with _told(url):
        system, path = _file_system(url)
        scheme = url.partition("://")[0]
        if any(letter in path for letter in "*?["):
            fixed = path[: min(path.index(letter) for letter in "*?[" if letter in path)].rpartition("/")[0]
            found = system.glob(path, detail=True)
        elif system.isdir(path) and scheme not in ("http", "https"):
            fixed, found = path, system.find(path, detail=True)
        else:
            fixed, found = path.rstrip("/").rpartition("/")[0], {path: system.info(path)}
        files = [
            RemoteFile(name[len(fixed) :].lstrip("/"), _url_of(scheme, name), int(info.get("size") or 0))
            for name, info in found.items()
            if info.get("type", "file") == "file"
        ]
    return sorted(files, key=lambda file: file.path)


def remote_identity(url: str) -> str:
    """Return what tells this file from another: the server's fingerprint and size, or size and time.

    Raises:
        ConfigError: The server cannot be asked, or says nothing that would tell.
    """
    with _told(url):
        system, path = _file_system(url)
        info = system.info(path)
        if url.startswith("memory://"):
            return f"sha256:{hashlib.sha256(system.cat_file(path)).hexdigest()}"
        known = [f"{key.lower()}:{str(info[key]).strip(chr(34))}" for key in _FINGERPRINTS if info.get(key)]
        times = [str(info[key]) for key in _TIMES if info.get(key)]
        if not known and not times:
            raise ConfigError(
                f"{url}: its server tells neither a fingerprint nor a time, so a change would go unseen. "
                "Copy the file to this machine first."
            )
        return f"{(known or times)[0]};size:{info.get('size')}"


def open_remote(url: str) -> BinaryIO:
    """Open a file for reading from its beginning.

    Raises:
        ConfigError: It cannot be opened.
    """
    with _told(url):
        system, path = _file_system(url)
        return cast(BinaryIO, system.open(path, "rb", block_size=BLOCK_BYTES, cache_type="readahead"))


def remote_head(url: str, count: int) -> bytes:
    """Return the first bytes of a file by one small request.

    Raises:
        ConfigError: It cannot be read.
    """
    with _told(url):
        system, path = _file_system(url)
        return bytes(system.cat_file(path, start=0, end=count))[:count]


def _url_of(scheme: str, name: str) -> str:
    return name if "://" in name else f"{scheme}://{name.lstrip('/')}"


def _file_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec.core
    except ImportError as error:
        raise ConfigError(f"{url}: needs the package fsspec. Install shardline[s3].") from error
    scheme = url.partition("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        extra = f"shardline[{_EXTRAS[scheme]}]" if scheme in _EXTRAS else "the package it names"
        raise ConfigError(f"{url}: {error}. Install {extra}, or copy the files to this machine.") from error
    except ValueError as error:
        raise ConfigError(f"{url}: no file system for {scheme}:// is known ({error}).") from error
    return system, path


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Turn the errors of any file system into one that names the address."""
    try:
        yield
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError(f"{url}: there is no such file. Check the address.") from error
    except Exception as error:  # each file system has its own, with no common base
        reason = str(error) or type(error).__name__
        raise ConfigError(
            f"{url}: cannot be read ({reason}). Check the address, the rights and the network."
        ) from error
