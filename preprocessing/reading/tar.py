"""Tar archives: the members of one that lies open, and the bytes of each member of a compressed one.

Headers are checked by their sums, and an archive without its end (two blocks of zeros) is
truncated: a copy that stopped between two members must not pass for a small archive. Formats:
POSIX.1-2001 (pax), POSIX.1-1988 (ustar), GNU (long names).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.names import is_data_name

BLOCK = 512
_REGULAR = (b"0", b"\0", b"7")
_MOST_DIGITS = 18  # of a number written out
_MOST_HEADER_BYTES = 2**20  # of a pax header or a long name


@dataclass(frozen=True)
class TarMember:
    """A file in an archive: its name and where its bytes lie in the (decompressed) archive."""

    name: str
    first_byte: int
    num_bytes: int


def is_tar_header(block: bytes) -> bool:
    """Tell whether a block is the header of a member, by its checksum."""
    if len(block) < BLOCK or not block.strip(b"\0"):
        return False
    expected = _number(block[148:156])
    return expected is not None and expected == sum(block[:148]) + 8 * ord(" ") + sum(block[156:])


def tar_members(read: Callable[[int], bytes], skip: Callable[[int], object], name: str) -> Iterator[TarMember]:
    """Yield the regular files of an archive; the caller may read the bytes of each before it asks for the next.

    Args:
        read: Returns the next bytes of the archive, fewer than asked for at its end only.
        skip: Goes to a place in the archive, counted from its beginning.
        name: The archive as the user named it, for messages.

    Raises:
        DamagedStreamError: A header is damaged, or the archive has no end.
    """
    position = 0
    long_name: str | None = None
    pax: dict[str, str] = {}
    while True:
        header = read(BLOCK)
        if len(header) < BLOCK:
            raise DamagedStreamError(name, f"the tar archive is truncated at byte {position + len(header)}", True)
        if not header.strip(b"\0"):
            _check_end(read, position, name)
            return
        size = _number(header[124:136])
        if not is_tar_header(header) or size is None or size < 0:
            raise DamagedStreamError(name, f"damaged tar header at byte {position}", False)
        kind = header[156:157]
        body = position + BLOCK
        if kind in (b"x", b"L", b"g", b"K"):
            if size > _MOST_HEADER_BYTES:
                raise DamagedStreamError(name, f"damaged tar header at byte {position} ({size} bytes)", False)
            data = read(size)
            if len(data) < size:
                raise DamagedStreamError(name, f"the tar archive is truncated at byte {body + len(data)}", True)
            if kind == b"x":
                pax = _pax_fields(data, position, name)
            elif kind == b"L":
                long_name = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
        else:
            if kind == b"S" or "GNU.sparse.major" in pax:
                raise DamagedStreamError(name, f"a sparse file at byte {position}, which is not read", False)
            size = int(pax.get("size", size))
            if kind in _REGULAR:
                yield TarMember(pax.get("path") or long_name or _name_of(header), body, size)
            else:
                member = pax.get("path") or long_name or _name_of(header)
                if kind in (b"1", b"2") and is_data_name(member, is_text_wanted=False):
                    raise DamagedStreamError(
                        name, f"the member {member} at byte {position} is a link, which is not read: unpack it", False
                    )
                size = 0 if kind in (b"1", b"2", b"3", b"4", b"5", b"6") else size
            long_name, pax = None, {}
        position = body + (size + BLOCK - 1) // BLOCK * BLOCK
        skip(position)


def _check_end(read: Callable[[int], bytes], position: int, name: str) -> None:
    """An archive ends with two blocks of zeros; what may follow are zeros."""
    first = True
    place = position + BLOCK
    while rest := read(2**16):
        if rest.strip(b"\0"):
            raise DamagedStreamError(name, f"bytes after the end of the tar archive, at byte {place}", False)
        first = False
        place += len(rest)
    if first or place < position + 2 * BLOCK:
        raise DamagedStreamError(name, f"the tar archive is truncated at byte {place}, within its end", True)


def _number(field: bytes) -> int | None:
    """Read a number of a header: octal digits, or GNU's binary form."""
    if field[:1] in (b"\x80", b"\xff"):
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else None
    digits = field.strip(b" \0")
    try:
        return int(digits or b"0", 8)
    except ValueError:
        return None


def _name_of(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].partition(b"\0")[0]
        name = prefix + b"/" + name if prefix else name
    return name.decode("utf-8", "surrogateescape")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _pax_fields(data: bytes, position: int, name: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    while data.strip(b"\0"):
        length, _, rest = data.partition(b" ")
        size = int(length) if _is_number(length.decode("latin-1")) else 0
        if not len(length) < size <= len(data) or data[size - 1 :][:1] != b"\n":
            raise DamagedStreamError(name, f"damaged pax header at byte {position}", False)
        key, _, value = rest[: size - len(length) - 2].partition(b"=")
        fields[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        data = data[size:]
    if not _is_number(fields.get("size", "0")):
        raise DamagedStreamError(name, f"damaged pax header at byte {position}", False)
    return fields
