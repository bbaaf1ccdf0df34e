"""Where sources lay, written so that a reader of an artifact finds them again."""

import re
from pathlib import Path

from contracts.workspace import StoreAtWork
from preprocessing.reading.hub import hub_file, is_hub_address
from preprocessing.reading.remote import is_url
from preprocessing.reading.source_file import SourceFile

_STRETCH = re.compile(r"(?P<place>.+)#bytes=(?P<first>\d+)\+(?P<count>\d+)")


def recorded_path(path: Path, store: StoreAtWork) -> str:
    """Write a path: from the store's root where both lie in it. `found_path` reads it."""
    return store.relative(path) if store.output is None else path.resolve().as_posix()


def found_path(recorded: str, artifact: Path) -> Path:
    """Return the place of a recorded path; the store's root is two folders above an artifact in it."""
    inside = artifact.resolve().parent.parent / recorded
    return inside if inside.exists() else Path(recorded)


def recorded_source(source: SourceFile, store: StoreAtWork) -> str:
    """Write where a source lies; of a member of an archive, its bytes in it. `found_source` reads it."""
    if isinstance(source.place, str):
        return source.place
    path = recorded_path(source.place, store)
    return path if source.num_bytes is None else f"{path}#bytes={source.first_byte}+{source.num_bytes}"


def found_place(recorded: str, artifact: Path) -> str:
    """Return where a recorded source lies, for people."""
    return recorded if is_url(recorded) else str(found_path(recorded, artifact))


def found_source(name: str, place: str) -> SourceFile:
    """Return the source that lies at a place given by `found_place`."""
    if is_hub_address(place):
        return hub_file(place)
    if is_url(place):
        return SourceFile(name, place)
    stretch = None if Path(place).exists() else _STRETCH.fullmatch(place)
    if stretch is None:
        return SourceFile(name, Path(place))
    return SourceFile(name, Path(stretch["place"]), int(stretch["first"]), int(stretch["count"]))
