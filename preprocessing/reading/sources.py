"""The files behind the sources a user names: files, folders, globs, archives, addresses, hub datasets."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from contracts.artifact import MANIFEST, Artifact
from contracts.errors import ConfigError
from contracts.files import user_path
from contracts.json_text import parse_json
from preprocessing.reading.containers import STATE, saved_dataset_files, with_members
from preprocessing.reading.hub import hub_file, hub_identity, is_hub_address
from preprocessing.reading.names import DATA_NAMES, TEXT_NAMES, is_data_name
from preprocessing.reading.pile import pile_files
from preprocessing.reading.remote import is_url, list_remote, remote_identity
from preprocessing.reading.source_file import SourceFile


@dataclass(frozen=True)
class SourceSettings:
    """How a stage's sources are to be understood.

    Args:
        part: Folder taken of a corpus artifact, split of a saved dataset, part of the Pile.
        setting: Name of the setting, for messages.
        is_text_wanted: Files of plain text are data, not notes beside it.
        preset: A published corpus whose files are known by name: "pile".
    """

    part: str = "train"
    setting: str = "sources"
    is_text_wanted: bool = False
    preset: str | None = None


def expand_sources(sources: Sequence[str], how: SourceSettings | None = None) -> list[SourceFile]:
    """List the files that `sources` stand for, in the order given, folders and globs by name.

    Raises:
        ConfigError: A source does not exist, or stands for no file.
    """
    how = how or SourceSettings()
    found = with_members(_whole_files(sources, how), is_text_wanted=how.is_text_wanted)
    return _with_distinct_names(list(found))


def _whole_files(sources: Sequence[str], how: SourceSettings) -> list[SourceFile]:
    """List the files before archives are opened."""
    files: list[SourceFile] = []
    for source in sources:
        if not source:
            raise ConfigError(f"{how.setting}: an empty text is no file or folder. Leave it out.")
        found = _files_of(source, how)
        if not found:
            names = TEXT_NAMES if how.is_text_wanted else DATA_NAMES
            raise ConfigError(
                f"{how.setting}: {source!r} holds no data file. Data files end in {names}; "
                "name other files one by one or by a glob, and plain text by format: text (--format text)."
            )
        for file in found:
            if not _is_unicode(file.name):
                raise ConfigError(f"{how.setting}: the file name {file.name!r} is not valid UTF-8. Rename the file.")
        files += found
    return _with_distinct_names(files)


def _files_of(source: str, how: SourceSettings) -> list[SourceFile]:
    if how.preset == "pile":
        return pile_files(source, how.part)
    if is_hub_address(source):
        return [hub_file(source)]
    if is_url(source):
        listed = list_remote(source)
        is_one = len(listed) == 1 and "/" not in listed[0].path
        is_named = is_one or any(letter in source for letter in "*?[")
        return [
            SourceFile(file.path, file.url, num_bytes=file.size_bytes)
            for file in listed
            if is_named or is_data_name(file.path, is_text_wanted=how.is_text_wanted)
        ]
    path = user_path(source.removeprefix("file://"))
    if path.is_file():
        return [SourceFile(path.name, path)]
    if path.is_dir():
        folder = _data_folder(path, how.part)
        saved = saved_dataset_files(folder, how.part)
        return _files_below(folder, how.is_text_wanted) if saved is None else saved
    if any(letter in source for letter in "*?["):
        return _files_of_glob(str(path))
    raise ConfigError(f"{how.setting}: there is no file or folder {source!r}. Check the path.")


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def corpus_files(corpus: Artifact, part: str) -> list[SourceFile]:
    """List the files of one part (train, heldout) of a corpus artifact.

    Raises:
        ConfigError: The corpus has no such part.
    """
    files = [
        SourceFile(entry.path, corpus.path / entry.path)
        for entry in corpus.manifest.files
        if entry.path.startswith(f"{part}/")
    ]
    if not files:
        parts = sorted({entry.path.split("/")[0] for entry in corpus.manifest.files if "/" in entry.path})
        raise ConfigError(f"{corpus.path} has no part {part!r}; it has {', '.join(parts) or 'none'}.")
    return files


def source_files(sources: Sequence[str], inputs: Mapping[str, Artifact], how: SourceSettings) -> list[SourceFile]:
    """List the files a stage reads: those of its corpus artifact, or else of its `sources`.

    Raises:
        ConfigError: Both are given, or neither.
    """
    stage = how.setting.partition(".")[0]
    if "corpus" in inputs:
        if sources:
            raise ConfigError(f"{stage}: both a corpus artifact and {how.setting} are given. Keep one.")
        return corpus_files(inputs["corpus"], how.part)
    if not sources:
        raise ConfigError(f"{stage}: no input. Set {how.setting} (--source PATH), or give a corpus artifact.")
    return expand_sources(sources, how)


def raw_source_files(sources: Sequence[str], how: SourceSettings) -> dict[str, Path]:
    """Name the raw input files for a recipe; the number in front keeps their order."""
    return {key: file.path for key, file in _raw_sources(sources, how).items() if not file.is_remote}


def raw_source_identities(sources: Sequence[str], how: SourceSettings) -> dict[str, str]:
    """Name the raw inputs that lie elsewhere for a recipe, each with what tells it from another version."""
    return {
        key: hub_identity(str(file.place)) if is_hub_address(str(file.place)) else remote_identity(str(file.place))
        for key, file in _raw_sources(sources, how).items()
        if file.is_remote
    }


def _raw_sources(sources: Sequence[str], how: SourceSettings) -> dict[str, SourceFile]:
    files = _whole_files(sources, how) if sources else []
    return {f"source{number:06d}/{file.name}": file for number, file in enumerate(files)}


def _data_folder(path: Path, part: str) -> Path:
    try:
        manifest = parse_json((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return path
    is_corpus = isinstance(manifest, dict) and manifest.get("kind") == "corpus"
    return path / part if is_corpus else path


def _files_below(folder: Path, is_text_wanted: bool) -> list[SourceFile]:
    found = [
        SourceFile(path.relative_to(folder).as_posix(), path)
        for path in _walk(folder)
        if is_data_name(path.relative_to(folder).as_posix(), is_text_wanted=is_text_wanted) and _is_there(path)
    ]
    return sorted(_without_caches(found), key=lambda file: file.name)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, through links to folders too, each real folder once."""
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (Path(root, name) for name in names)


def _is_there(path: Path) -> bool:
    """Tell a file from what is none.

    Raises:
        ConfigError: It is a link to nothing.
    """
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{path} is a link to {path.readlink()}, which is not there. Mend or remove the link.")
    return path.is_file()


def _without_caches(files: list[SourceFile]) -> list[SourceFile]:
    """Leave out what `datasets` keeps beside its data (cache-*.arrow)."""
    folders = {file.path.parent for file in files if file.path.suffix == ".arrow"}
    saved = {folder for folder in folders if (folder / STATE).is_file()}
    listed = {file.place for folder in saved for file in saved_dataset_files(folder, "") or []}
    return [file for file in files if file.path.parent not in saved or file.place in listed]


def _files_of_glob(pattern: str) -> list[SourceFile]:
    fixed: list[str] = []
    for piece in Path(pattern).parts[:-1]:
        if any(letter in piece for letter in "*?["):
            break
        fixed.append(piece)
    root = Path(*fixed) if fixed else Path()
    try:
        paths = list(root.glob(str(Path(*Path(pattern).parts[len(fixed) :]))))
    except ValueError as error:
        raise ConfigError(f"the glob {pattern!r} cannot be used: {error}.") from error
    files = [SourceFile(path.relative_to(root).as_posix(), path) for path in paths if _is_there(path)]
    return sorted(files, key=lambda file: file.name)


def _with_distinct_names(files: list[SourceFile]) -> list[SourceFile]:
    taken: dict[str, int] = {}
    result = []
    for file in files:
        taken[file.name] = taken.get(file.name, 0) + 1
        count = taken[file.name]
        result.append(file if count == 1 else replace(file, name=f"{file.name}#{count}"))
    return result
