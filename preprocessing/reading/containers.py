"""Files and folders that stand for several source files: tar archives, folders of `datasets.save_to_disk`."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from contracts.errors import ConfigError
from contracts.json_text import parse_json
from preprocessing.reading.compression import packing_of
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.names import is_archive_name, is_data_name
from preprocessing.reading.source_file import SourceFile
from preprocessing.reading.tar import is_tar_header, tar_members

STATE = "state.json"
SPLITS = "dataset_dict.json"


def with_members(files: Iterable[SourceFile], *, is_text_wanted: bool) -> Iterator[SourceFile]:
    """Put the members of tar archives in the place of the archives; of those that are not compressed.

    A compressed archive can only be read as a stream, and stays one file.

    Raises:
        ConfigError: An archive holds no data file.
    """
    for file in files:
        if is_archive_name(file.file_name) and not file.is_remote and _lies_open(file):
            yield from _members(file, is_text_wanted)
        else:
            yield file


def _lies_open(file: SourceFile) -> bool:
    head = file.head(512)
    return packing_of(head) == "plain" and is_tar_header(head)


def _members(archive: SourceFile, is_text_wanted: bool) -> list[SourceFile]:
    with archive.open() as raw:
        try:
            members = list(tar_members(raw.read, raw.seek, archive.name))
        except DamagedStreamError:
            return [archive]  # reading it as a stream says what is wrong, after what is good
    found = [
        SourceFile(f"{archive.name}/{member.name}", archive.place, member.first_byte, member.num_bytes)
        for member in members
        if is_data_name(member.name, is_text_wanted=is_text_wanted)
    ]
    if not found:
        raise ConfigError(
            f"{archive.place}: none of its {len(members)} members is a data file. Name the form of its files "
            "(format: text), or unpack it."
        )
    return found


def saved_dataset_files(folder: Path, part: str) -> list[SourceFile] | None:
    """List the files of a folder that `datasets.save_to_disk` wrote; None if it is no such folder.

    Args:
        part: The split taken where the folder holds several.

    Raises:
        ConfigError: The folder is not whole, or has no such split.
    """
    if (folder / SPLITS).is_file():
        splits = _read(folder / SPLITS).get("splits")
        names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        if part not in names:
            raise ConfigError(
                f"{folder}: has no split {part!r}; it has {', '.join(names) or 'none'}. Name the split's own folder."
            )
        return saved_dataset_files(folder / part, part)
    if not (folder / STATE).is_file():
        return None
    state = _read(folder / STATE)
    listed = state.get("_data_files")
    if not isinstance(listed, list):
        return None
    if state.get("_indices_data_files"):
        raise ConfigError(f"{folder}: holds a selection of rows of a larger dataset. Save it anew (save_to_disk).")
    names = [str(item.get("filename")) for item in listed if isinstance(item, dict)]
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: its {STATE} names {name}, which is not there. Copy the folder again.")
    return [SourceFile(name, folder / name) for name in names]


def _read(path: Path) -> dict[str, object]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}). Copy the folder again.") from error
    return found if isinstance(found, dict) else {}
