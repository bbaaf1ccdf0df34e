"""The files behind the sources a user names: files, folders, globs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from contracts.artifact import MANIFEST, Artifact
from contracts.errors import ConfigError
from contracts.files import user_path
from contracts.json_text import parse_json
from contracts.workspace import StoreAtWork
from preprocessing.reading.source_file import SourceFile

DATA_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".parquet")


def expand_sources(sources: Sequence[str], *, part: str = "train", setting: str = "sources") -> list[SourceFile]:
    """List the files that `sources` stand for, in the order given, folders and globs by name.

    Args:
        part: Folder taken of a corpus artifact, so that its held-out documents stay out.
        setting: Name of the setting, for messages.

    Raises:
        ConfigError: A source does not exist, or stands for no file.
    """
    files: list[SourceFile] = []
    for source in sources:
        if not source:
            raise ConfigError(f"{setting}: an empty text is no file or folder. Leave it out.")
        path = user_path(source)
        if path.is_file():
            found = [SourceFile(path.name, path)]
        elif path.is_dir():
            found = _files_below(_data_folder(path, part))
        elif any(letter in source for letter in "*?["):
            found = _files_of_glob(str(path))
        else:
            raise ConfigError(f"{setting}: there is no file or folder {source!r}. Check the path.")
        if not found:
            raise ConfigError(
                f"{setting}: {source!r} holds no data file. Data files end in {', '.join(DATA_SUFFIXES)}; "
                "name other files one by one or by a glob."
            )
        for file in found:
            if not _is_unicode(file.name):
                raise ConfigError(f"{setting}: the file name {file.name!r} is not valid UTF-8. Rename the file.")
        files += found
    return _with_distinct_names(files)


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


def source_files(sources: Sequence[str], inputs: Mapping[str, Artifact], *, part: str, stage: str) -> list[SourceFile]:
    """List the files a stage reads: those of its corpus artifact, or else of its `sources`.

    Raises:
        ConfigError: Both are given, or neither.
    """
    if "corpus" in inputs:
        if sources:
            raise ConfigError(f"{stage}: both a corpus artifact and {stage}.sources are given. Keep one.")
        return corpus_files(inputs["corpus"], part)
    if not sources:
        raise ConfigError(f"{stage}: no input. Set {stage}.sources (--source PATH), or give a corpus artifact.")
    return expand_sources(sources, part=part, setting=f"{stage}.sources")


def recorded_path(path: Path, store: StoreAtWork) -> str:
    """Write a path so that a reader of the artifact finds it again: from the store's root where both lie in it.

    `found_path` reads it.
    """
    return store.relative(path) if store.output is None else path.resolve().as_posix()


def found_path(recorded: str, artifact: Path) -> Path:
    """Return the place of a recorded path; the store's root is two folders above an artifact in it."""
    inside = artifact.resolve().parent.parent / recorded
    return inside if inside.exists() else Path(recorded)


def raw_source_files(sources: Sequence[str], *, part: str, stage: str) -> dict[str, Path]:
    """Name the raw input files for a recipe; the number in front keeps their order."""
    files = expand_sources(sources, part=part, setting=f"{stage}.sources")
    return {f"source{number:06d}/{file.name}": file.path for number, file in enumerate(files)}


def _data_folder(path: Path, part: str) -> Path:
    try:
        manifest = parse_json((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return path
    is_corpus = isinstance(manifest, dict) and manifest.get("kind") == "corpus"
    return path / part if is_corpus else path


def _files_below(folder: Path) -> list[SourceFile]:
    found = [
        SourceFile(path.relative_to(folder).as_posix(), path)
        for path in folder.rglob("*")
        if path.name.endswith(DATA_SUFFIXES)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    ]
    return sorted(found, key=lambda file: file.name)


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
    files = [SourceFile(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(files, key=lambda file: file.name)


def _with_distinct_names(files: list[SourceFile]) -> list[SourceFile]:
    taken: dict[str, int] = {}
    result = []
    for file in files:
        taken[file.name] = taken.get(file.name, 0) + 1
        count = taken[file.name]
        result.append(file if count == 1 else SourceFile(f"{file.name}#{count}", file.path))
    return result
