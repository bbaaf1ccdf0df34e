"""Blocks of a tar archive that is read as a stream, as a compressed one must be.

Lines are counted through all members, so that the archive is one file in the accounts; byte
offsets too, counting the bytes of the members alone. Members may be compressed themselves.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from preprocessing.reading.blocks import Block, Position
from preprocessing.reading.chunk_reader import ChunkReader
from preprocessing.reading.compression import Chunks, Packing, decode, packing_of
from preprocessing.reading.damage import DamagedStreamError
from preprocessing.reading.names import DATA_NAMES, PACKING_SUFFIXES, TEXT_NAMES, is_data_name
from preprocessing.reading.source_file import SourceFile
from preprocessing.reading.tar import TarMember, tar_members

MemberBlocks = Callable[[bytes, str, Chunks, Position], Iterator[Block]]
"""Cuts the decompressed chunks of a member into blocks; told its first bytes and its name."""


def tar_blocks(
    source: SourceFile, chunks: Chunks, position: Position, member_blocks: MemberBlocks, *, is_text_wanted: bool
) -> Iterator[Block]:
    """Give the blocks of the members that hold data, the first of them at `position`.

    Raises:
        DamagedStreamError: After the last whole record before the damage; or no member holds data.
    """
    reader = ChunkReader(chunks)
    has_data = False
    for member in tar_members(reader.read, reader.skip_to, source.name):
        if not is_data_name(member.name, is_text_wanted=is_text_wanted):
            continue
        has_data = True
        decoded = _decoded(_member_chunks(reader, member, source.name), f"{source.name}/{member.name}")
        first = next(decoded, None)
        if first is None and member.name.endswith(PACKING_SUFFIXES[1:]):
            reason = f"its member {member.name}, at byte {member.first_byte} of the archive, holds no byte"
            raise DamagedStreamError(source.name, reason, False)
        if first is None:
            continue
        for block in member_blocks(first[0], member.name, chain([first], decoded), position):
            yield block
            position = replace(block.end, offset=max(block.end.offset, position.offset))
    if not has_data:
        names = TEXT_NAMES if is_text_wanted else f"{DATA_NAMES}; plain text is taken with format: text"
        raise DamagedStreamError(source.name, f"the archive holds no data file ({names})", False)


def _member_chunks(reader: ChunkReader, member: TarMember, name: str) -> Chunks:
    yield from reader.chunks(member.num_bytes)
    missing = member.first_byte + member.num_bytes - reader.position
    if missing > 0:
        raise DamagedStreamError(name, f"the tar archive is truncated at byte {reader.position}", True)


def _decoded(chunks: Chunks, name: str) -> Chunks:
    first = next(chunks, None)
    if first is None:
        return iter(())
    packing: Packing = packing_of(first[0])
    return decode(chain([first], chunks), packing, name)
