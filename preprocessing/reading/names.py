"""Names by which data files are found in folders and archives; what is in them their bytes tell."""

from pathlib import PurePosixPath

PACKING_SUFFIXES = ("", ".gz", ".zst", ".xz", ".bz2")
ARCHIVE_SUFFIXES = (*(f".tar{suffix}" for suffix in PACKING_SUFFIXES), ".tgz")
DATA_SUFFIXES = (
    *(name + suffix for name in (".jsonl", ".json", ".ndjson", ".warc", ".wet") for suffix in PACKING_SUFFIXES),
    ".parquet",
    ".arrow",
    *ARCHIVE_SUFFIXES,
)
DATA_NAMES = ".jsonl, .json, .ndjson, .warc, .wet, .tar (each also with .gz, .zst, .xz, .bz2), .parquet, .arrow"
TEXT_NAMES = ".txt, .text, .md, .tar (each also with .gz, .zst, .xz, .bz2)"
TEXT_SUFFIXES = tuple(name + suffix for name in (".txt", ".text", ".md") for suffix in PACKING_SUFFIXES)


def is_data_name(path: str, *, is_text_wanted: bool) -> bool:
    """Tell whether a file in a folder or archive holds data, by its path in there; hidden ones do not.

    Args:
        is_text_wanted: Files of plain text are data; otherwise they are taken for notes beside it.
    """
    parts = PurePosixPath(path).parts
    if not parts or any(part.startswith(".") for part in parts):
        return False
    suffixes = (*TEXT_SUFFIXES, *ARCHIVE_SUFFIXES) if is_text_wanted else DATA_SUFFIXES
    return parts[-1].endswith(suffixes)


def is_text_name(name: str) -> bool:
    return name.lower().endswith(TEXT_SUFFIXES)


def is_archive_name(name: str) -> bool:
    return name.lower().endswith(ARCHIVE_SUFFIXES)
