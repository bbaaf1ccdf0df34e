"""Of a damaged compressed file only what stands under a checksum that holds becomes data."""

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from ingest_cases import ingest_files

from preprocessing.dataset.token_dataset import TokenDataset

LINES = [
    json.dumps({"text": f"document {n} " + " ".join(str((n * 7919 + j * 104729) % 99991) for j in range(60))})
    for n in range(240)
]
PARTS = ["".join(f"{line}\n" for line in LINES[start : start + 60]).encode() for start in range(0, 240, 60)]
ZSTD = zstandard.ZstdCompressor(write_checksum=True)
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda data: gzip.compress(data, mtime=0),
    "zst": ZSTD.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
}


def texts_of(path: Path) -> list[str]:
    dataset = TokenDataset(path)
    return [
        dataset.tokenizer.decode(dataset.document(number).tolist()).removesuffix("<|endoftext|>")
        for number in range(dataset.num_documents)
    ]


@pytest.mark.parametrize("packing", list(PACKINGS))
@pytest.mark.parametrize("part_bytes", [2**20, 3000])
def test_a_flipped_bit_leaves_whole_members_and_nothing_invented(tmp_path: Path, packing: str, part_bytes: int):
    members = [PACKINGS[packing](part) for part in PARTS]
    whole = b"".join(members)
    wanted = [json.loads(line)["text"] for line in LINES]
    for seed in range(6):
        place = random.Random(seed).randrange(len(members[0]) + 40, len(whole) - len(members[3]))
        data = bytearray(whole)
        data[place] ^= 0x10
        source = tmp_path / f"a{seed}.jsonl.{packing}"
        source.write_bytes(data)
        made = ingest_files([str(source)], tmp_path / f"d{seed}", on_error="quarantine", part_bytes=part_bytes)
        found = texts_of(made.path)
        assert set(found) <= set(wanted) and found[:60] == wanted[:60]
        assert made.summary["damaged_files"] >= 1 or found == wanted
        counts = made.summary
        assert counts["lines"] == counts["documents"] + counts["empty"] + counts["filtered"] + counts["rejected"]


def test_a_truncated_file_is_taken_as_far_as_it_goes(tmp_path: Path):
    whole = gzip.compress(b"".join(PARTS), mtime=0)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    made = ingest_files([str(tmp_path / "a.jsonl.gz")], tmp_path / "d", on_error="quarantine")
    found = texts_of(made.path)
    assert 60 < len(found) < 200 and found == [json.loads(line)["text"] for line in LINES[: len(found)]]


def test_a_line_over_the_end_of_a_whole_frame_is_dropped_with_the_damaged_one(tmp_path: Path):
    joined = b"".join(PARTS)
    cut = joined.index(b"\n", len(joined) // 2) + 40  # in the middle of a line
    first, second = ZSTD.compress(joined[:cut]), bytearray(ZSTD.compress(joined[cut:]))
    second[len(second) // 2] ^= 4
    (tmp_path / "a.jsonl.zst").write_bytes(first + second)
    made = ingest_files([str(tmp_path / "a.jsonl.zst")], tmp_path / "d", on_error="quarantine", part_bytes=len(first))
    found = texts_of(made.path)
    assert found == [json.loads(line)["text"] for line in joined[:cut].decode().splitlines()[:-1]]
