"""Real text that every machine with Python has, found without reading it.

| subset | what |
|---|---|
| PythonSource | the standard library's modules |
| PythonTests | its tests, where they are installed |
| PackageSource | modules of some large pure-Python packages, where they are installed |
| PackageMetadata | header fields of the METADATA of installed packages |
| Documentation | READMEs in METADATA; texts of /usr/share/doc |
| Licenses | licence files of packages, /usr/share/common-licenses, Debian copyright files |
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOC_FOLDER = Path("/usr/share/doc")
LICENSE_FOLDER = Path("/usr/share/common-licenses")
PURE_PACKAGES = ("sympy", "networkx", "sqlalchemy")
_TEXT_SUFFIXES = (".txt", ".rst", ".md", ".html")
_LICENSE_STEMS = ("license", "licence", "copying", "notice", "authors")


@dataclass(frozen=True)
class Candidate:
    """A file that may become a document.

    Args:
        subset: Subset of the document; for METADATA the subset of its header fields.
        name: Root and relative path, such as `stdlib/json/decoder.py`; the same on like machines.
    """

    subset: str
    name: str
    path: Path
    size_bytes: int
    mtime_ns: int


def find_candidates() -> list[Candidate]:
    """List the files, in an order that mixes subsets and depends on their names alone."""
    found = [*_standard_library(), *_packages(), *_system_documents()]
    return sorted(found, key=lambda item: hashlib.blake2b(item.name.encode(), digest_size=8).digest())


def candidates_digest(candidates: list[Candidate]) -> str:
    """Return a digest of names, sizes and times of modification; no file is read."""
    lines = "".join(f"{item.name}\t{item.size_bytes}\t{item.mtime_ns}\n" for item in candidates)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _standard_library() -> Iterator[Candidate]:
    root = Path(sysconfig.get_path("stdlib"))
    for name, entry in _walk(root, skip=("site-packages", "dist-packages", "__pycache__", "lib2to3")):
        if name.endswith(".py"):
            is_test = name.startswith(("test/", "idlelib/idle_test/")) or "/test/" in name or "/tests/" in name
            yield _candidate("PythonTests" if is_test else "PythonSource", f"stdlib/{name}", entry)


def _packages() -> Iterator[Candidate]:
    root = Path(sysconfig.get_path("purelib"))
    if not root.is_dir():
        return
    for entry in _entries(root):
        if entry.name.endswith(".dist-info") and entry.is_dir():
            for name, file in _walk(Path(entry.path), skip=()):
                stem = name.rpartition("/")[2].lower()
                if name == "METADATA":
                    yield _candidate("PackageMetadata", f"packages/{entry.name}/{name}", file)
                elif stem.startswith(_LICENSE_STEMS):
                    yield _candidate("Licenses", f"packages/{entry.name}/{name}", file)
        elif entry.name in PURE_PACKAGES and entry.is_dir():
            for name, file in _walk(Path(entry.path), skip=("tests", "__pycache__")):
                if name.endswith(".py"):
                    yield _candidate("PackageSource", f"packages/{entry.name}/{name}", file)


def _system_documents() -> Iterator[Candidate]:
    for name, entry in _walk(LICENSE_FOLDER, skip=()):
        yield _candidate("Licenses", f"common-licenses/{name}", entry)
    for name, entry in _walk(DOC_FOLDER, skip=()):
        if name.endswith("/copyright"):
            yield _candidate("Licenses", f"doc/{name}", entry)
        elif name.endswith(_TEXT_SUFFIXES) or "." not in name.rpartition("/")[2]:
            yield _candidate("Documentation", f"doc/{name}", entry)


def _candidate(subset: str, name: str, entry: "os.DirEntry[str]") -> Candidate:
    status = entry.stat()
    return Candidate(subset, name, Path(entry.path), status.st_size, status.st_mtime_ns)


def _walk(root: Path, skip: tuple[str, ...]) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """Yield regular files below `root` with their relative paths; links and folders in `skip` stay out."""
    folders = [("", str(root))]
    while folders:
        prefix, folder = folders.pop()
        for entry in _entries(Path(folder)):
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in skip:
                    folders.append((f"{prefix}{entry.name}/", entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield prefix + entry.name, entry


def _entries(folder: Path) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # absent or not readable: another machine, another user
        return []
