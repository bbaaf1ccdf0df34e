"""The type of a file, told by its first bytes; its name decides only between text and JSON lines."""

from dataclasses import dataclass
from typing import Literal

from preprocessing.reading.compression import READ_BYTES, Packing, decode, packing_of
from preprocessing.reading.damage import DamagedStreamError, ForeignFileError
from preprocessing.reading.hub import is_hub_address
from preprocessing.reading.names import is_text_name
from preprocessing.reading.records import BOM, RecordFormat
from preprocessing.reading.source_file import SourceFile
from preprocessing.reading.tar import is_tar_header

Content = Literal["json_lines", "text", "parquet", "arrow_file", "arrow_stream", "warc", "tar", "hub"]

SEEKABLE: tuple[Content, ...] = ("parquet", "arrow_file", "arrow_stream")
_BZIP2_HEAD_BYTES = 2**20  # a block of up to 900 kB comes before the first byte
_REFUSED = {
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
    b"FEA1": "Feather version 1",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"\x28\xb5\x2f\xfd": "zstd inside another compression",
    b"\x1f\x8b": "gzip inside another compression",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"PARE": "encrypted Parquet",
    b"Obj\x01": "Avro",
    b"\x1f\x9d": "compress (.Z)",
    b"\x5d\0\0": "lzma without its container",
    b"\xff\x06\0\0sNaPpY": "Snappy",
}
_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class FileKind:
    """What a file is: its compression, and what stands in it."""

    packing: Packing
    content: Content


def detect_kind(source: SourceFile, form: RecordFormat) -> FileKind:
    """Tell the type of a file by its first bytes.

    Raises:
        ForeignFileError: The file is of a type that cannot be read here.
        ConfigError: The file cannot be opened.
    """
    if is_hub_address(str(source.place)):
        return FileKind("plain", "hub")
    head = source.head(READ_BYTES)
    packing = packing_of(head)
    if packing == "bzip2":
        head = source.head(_BZIP2_HEAD_BYTES)
    name = source.file_name
    if not head and name.endswith((".gz", ".zst", ".xz", ".bz2", ".parquet", ".arrow", ".tar", ".tgz")):
        suffix = name.rpartition(".")[2]
        raise ForeignFileError(
            f"{source.place}: holds no byte, so it is no {suffix} file. Copy it again, or leave it out."
        )
    inner = head if packing == "plain" else _first_bytes(head, packing, source.name)
    content = content_of(inner, name, form, where=str(source.place))
    if packing != "plain" and content in SEEKABLE:
        raise ForeignFileError(
            f"{source.place}: is a {content.partition('_')[0].title()} file inside {packing}, which cannot be read in "
            "parts. Unpack it; the format compresses by itself."
        )
    return FileKind(packing, content)


def _first_bytes(head: bytes, packing: Packing, name: str) -> bytes:
    """Decompress the beginning of a file, as far as it goes; what is wrong with it is said when it is read."""
    try:
        for chunk, _ in decode([(head, len(head))], packing, name):
            return chunk
    except DamagedStreamError:
        pass
    return b""


def content_of(head: bytes, name: str, form: RecordFormat, *, where: str) -> Content:
    """Tell what stands in a file by its first bytes, decompressed.

    Args:
        name: Of the file, which tells text from JSON lines.
        where: The file, for messages.

    Raises:
        ForeignFileError: It cannot be read here.
    """
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"ARROW1"):
        return "arrow_file"
    if head.startswith(b"\xff\xff\xff\xff") and 0 < int.from_bytes(head[4:8], "little", signed=True) < 2**28:
        return "arrow_stream"
    for magic, kind in _REFUSED.items():
        if head.startswith(magic):
            raise ForeignFileError(
                f"{where}: its first bytes say {kind}, which is not read. Convert it to JSON lines in UTF-8, "
                "plain or as .gz or .zst."
            )
    if head.startswith(_POINTER):
        raise ForeignFileError(f"{where}: is a pointer of Git LFS, not the file. Fetch the file itself (git lfs pull).")
    if head.startswith(b"WARC/"):
        return "warc"
    if is_tar_header(head[:512]):
        return "tar"
    return "text" if _is_text(head, name, form) else "json_lines"


def _is_text(head: bytes, name: str, form: RecordFormat) -> bool:
    if form.content != "auto":
        return form.content == "text"
    return is_text_name(name) and not head.removeprefix(BOM).lstrip(b" \t\r\n").startswith(b"{")
