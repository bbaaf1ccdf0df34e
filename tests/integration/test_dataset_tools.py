"""merge, split, import, sample: every document once, every byte where it belongs, damage refused."""

import hashlib
import json
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from corpora import texts, write_corpus
from ingest_cases import CASES, expected, ingest_files
from megatron_cases import SMALL

from contracts.artifact import Artifact, read_artifact
from contracts.errors import ConfigError, InputError
from contracts.progress import SilentProgress
from contracts.store import ArtifactStore
from flows.inspection import verify_path
from preprocessing.dataset.config import ImportConfig, MergeConfig, SplitConfig
from preprocessing.dataset.documents import choose_documents, show_documents
from preprocessing.dataset.hash_split import places
from preprocessing.dataset.importing import IMPORT
from preprocessing.dataset.indexed_dataset import IndexedDataset, PairWriter
from preprocessing.dataset.inspection import length_histogram, verify_dataset
from preprocessing.dataset.merge import MERGE, merge_pairs
from preprocessing.dataset.split import SPLIT
from preprocessing.dataset.token_dataset import TokenDataset

TOKENIZER = str(CASES / "_tokenizers" / "byte257")


def merged(paths: Sequence[Path | str], output: Path) -> Artifact:
    settings = MergeConfig(datasets=tuple(map(str, paths)))
    return MERGE.run(settings, store=ArtifactStore(output.parent / "store", output=output))


def part(path: Path, output: Path, **settings: object) -> Artifact:
    config = SplitConfig(dataset=str(path), **settings)  # type: ignore[arg-type]
    return SPLIT.run(config, store=ArtifactStore(output.parent / "store", output=output))


def imported(paths: Sequence[Path], output: Path, **settings: object) -> Artifact:
    config = ImportConfig(sources=tuple(map(str, paths)), **settings)  # type: ignore[arg-type]
    return IMPORT.run(config, store=ArtifactStore(output.parent / "store", output=output))


def corpus(path: Path, count: int, *, first: int = 0, subsets: Sequence[str] = ("Github", "Books/3")) -> Path:
    lines = (
        json.dumps({"text": text, "meta": {"pile_set_name": subsets[n % len(subsets)]}})
        for n, text in enumerate(texts(first + count)[first:])
    )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def documents(path: Path) -> list[bytes]:
    dataset = TokenDataset(path)
    return [dataset.document(number).tobytes() for number in range(dataset.num_documents)]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_merging_keeps_document_bounds_as_megatron_does(tmp_path: Path):
    found = merged([CASES / "ING-39" / "a", CASES / "ING-39" / "b"], tmp_path / "m").path
    pair = IndexedDataset(found / "data-00000")
    assert (pair.lengths.tolist(), pair.document_bounds.tolist()) == ([3, 1, 2, 1, 2, 1, 3], [0, 2, 3, 4, 7])
    wanted = expected("ING-39")
    text = json.dumps(wanted)
    assert sha256(found / "data-00000.bin") in text and sha256(found / "data-00000.idx") in text


def test_merging_gives_the_bytes_of_megatrons_builder(tmp_path: Path):
    folder = SMALL / "datasets"
    made = merged([folder / "b", folder / "b2"], tmp_path / "m")
    assert verify_path(made.path, made)[0] == []
    found = made.path
    for suffix in (".bin", ".idx"):
        assert (found / f"data-00000{suffix}").read_bytes() == (folder / f"merged{suffix}").read_bytes()


def test_merging_shards_gives_the_bytes_of_one_ingest(tmp_path: Path):
    sources = [str(corpus(tmp_path / "a.jsonl", 60)), str(corpus(tmp_path / "b.jsonl", 40, first=60))]
    whole = ingest_files(sources, tmp_path / "whole")
    parts = [ingest_files([source], tmp_path / f"part{n}", shard_tokens=4000) for n, source in enumerate(sources)]
    found = merged([item.path for item in parts], tmp_path / "m")
    for name in ("data-00000.bin", "data-00000.idx"):
        assert (found.path / name).read_bytes() == (whole.path / name).read_bytes()
    same = ("lines", "documents", "tokens", "bytes", "subsets", "vocab_size", "eod_id")
    assert {name: found.summary[name] for name in same} == {name: whole.summary[name] for name in same}
    rows, wanted = (TokenDataset(item.path).document_rows(np.arange(100)) for item in (found, whole))
    assert rows == wanted
    assert verify_path(found.path, found)[0] == []


def test_files_of_one_name_stay_apart_after_a_merge(tmp_path: Path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    sources = [corpus(tmp_path / "x" / "a.jsonl", 3), corpus(tmp_path / "y" / "a.jsonl", 3, first=3)]
    parts = [ingest_files([str(source)], tmp_path / f"p{n}") for n, source in enumerate(sources)]
    dataset = TokenDataset(merged([item.path for item in parts], tmp_path / "m").path)
    assert [row["file"] for row in dataset.document_rows(np.arange(6))] == ["a.jsonl"] * 3 + ["a.jsonl#2"] * 3
    places = [dataset.source_paths[name] for name in ("a.jsonl", "a.jsonl#2")]
    assert places == [str(path.resolve()) for path in sources]


def test_datasets_that_do_not_fit_together_are_not_merged(tmp_path: Path):
    folder = SMALL / "datasets"
    with pytest.raises(InputError, match=r"int32.*uint16.*different vocabularies"):
        merged([folder / "a", folder / "b"], tmp_path / "m")
    source = str(corpus(tmp_path / "a.jsonl", 4))
    plain = ingest_files([source], tmp_path / "plain")
    bare = ingest_files([source], tmp_path / "bare", append_eod=False)
    with pytest.raises(ConfigError, match="append_eod"):
        merged([plain.path, bare.path], tmp_path / "m")
    with pytest.raises(ConfigError, match="import"):
        merged([plain.path, folder / "a"], tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_merging_needs_no_memory_for_more_documents(tmp_path: Path):
    peaks = []
    for count in (2**18, 2**21):
        writer = PairWriter(tmp_path / f"p{count}", np.dtype("<u2"))
        writer.append(np.zeros(count, np.uint16), np.ones(count, np.int64))
        writer.finish()
        pair = IndexedDataset(tmp_path / f"p{count}")
        tracemalloc.start()
        merge_pairs([pair, pair], tmp_path / f"m{count}", progress=SilentProgress())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert len(IndexedDataset(tmp_path / f"m{2**21}")) == 2**22
    assert peaks[1] < 1.05 * peaks[0] < 2**24


def test_every_document_is_in_exactly_one_part(tmp_path: Path):
    data = ingest_files([str(corpus(tmp_path / "a.jsonl", 150))], tmp_path / "data", shard_tokens=5000)
    for by, weights in (("hash", "70,20,10"), ("position", "70,20,10")):
        parts = [
            part(data.path, tmp_path / by / name, by=by, weights=weights, part=name)
            for name in ("train", "valid", "test")
        ]
        found = [document for item in parts for document in documents(item.path)]
        assert sorted(found) == sorted(documents(data.path))
        assert sum(item.summary["bytes"] for item in parts) == data.summary["bytes"]
        assert all(verify_path(item.path, item)[0] == [] for item in parts)
        if by == "position":
            assert found == documents(data.path)


def test_a_part_by_hash_keeps_its_documents_when_data_are_appended(tmp_path: Path):
    short = ingest_files([str(corpus(tmp_path / "a.jsonl", 80))], tmp_path / "short")
    long = ingest_files([str(corpus(tmp_path / "b.jsonl", 160))], tmp_path / "long")
    for name in ("train", "valid", "test"):
        before, after = (
            documents(part(item.path, tmp_path / f"{item.path.name}-{name}", weights="60,30,10", part=name).path)
            for item in (short, long)
        )
        assert after[: len(before)] == before


def test_documents_of_several_sequences_are_split_whole(tmp_path: Path):
    folder = SMALL / "datasets"
    parts = [part(folder / "b2", tmp_path / name, weights="50,25,25", part=name) for name in ("train", "valid", "test")]
    assert sum(item.summary["documents"] for item in parts) == 180
    assert sum(item.summary["tokens"] for item in parts) == 7602
    found = sorted(document for item in parts for document in documents(item.path))
    assert found == sorted(documents(folder / "b2"))
    assert sum(TokenDataset(item.path).num_sequences for item in parts) == 349


def test_a_part_by_subset_holds_only_that_subset(tmp_path: Path):
    data = ingest_files([str(corpus(tmp_path / "a.jsonl", 20))], tmp_path / "data")
    found = part(data.path, tmp_path / "books", by="subset", part="Books/3")
    assert documents(found.path) == documents(data.path)[1::2]
    assert list(found.summary["subsets"]) == ["Books/3"]
    with pytest.raises(ConfigError, match=r"'Books'; the subsets of .* are Books/3, Github"):
        part(data.path, tmp_path / "none", by="subset", part="Books")


def test_a_part_without_documents_is_refused(tmp_path: Path):
    data = ingest_files([str(corpus(tmp_path / "a.jsonl", 3))], tmp_path / "data")
    with pytest.raises(InputError, match="holds none of its 3 documents"):
        part(data.path, tmp_path / "none", by="position", weights="99,1,0", part="valid")
    assert not (tmp_path / "none").exists()


def test_places_of_hashes_are_even_and_change_with_the_seed():
    keys = np.arange(200_000, dtype=np.uint64)
    first, second = places(keys, 1), places(keys, 2)
    assert first.min() >= 0 and first.max() < 1
    assert np.abs(np.histogram(first, 10)[0] - 20_000).max() < 600
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.01


def neox_merge(pair: IndexedDataset, target: Path) -> Path:
    """Write a pair as GPT-NeoX's merge leaves it: the document bounds stop at 0."""
    data = bytearray(pair.idx_path.read_bytes()[: 34 + 12 * len(pair)])
    data[26:34] = struct.pack("<Q", 1)
    target.with_suffix(".idx").write_bytes(bytes(data) + struct.pack("<q", 0))
    target.with_suffix(".bin").write_bytes(pair.bin_path.read_bytes())
    return target


def test_a_dataset_merged_by_neox_is_imported_whole(tmp_path: Path):
    pair = IndexedDataset(SMALL / "datasets" / "a")
    notes: list[str] = []
    target = neox_merge(pair, tmp_path / "neox")
    found = imported([target], tmp_path / "data")
    assert notes == []
    assert (found.path / "data-00000.bin").read_bytes() == pair.bin_path.read_bytes()
    assert (found.path / "data-00000.idx").read_bytes() == pair.idx_path.read_bytes()
    assert found.summary["sources"][0]["form"] == "MMIDIDX, merged by GPT-NeoX"


def test_a_lazy_dataset_of_neox_is_imported(tmp_path: Path):
    pair = IndexedDataset(SMALL / "datasets" / "b2")
    lengths = pair.lengths.astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    head = b"TNTIDX\x00\x00" + struct.pack("<6Q", 1, 4, 4, len(lengths), len(lengths), len(pair.document_bounds))
    numbers = [np.arange(len(lengths) + 1), offsets, lengths, pair.document_bounds]
    (tmp_path / "lazy.idx").write_bytes(head + b"".join(array.astype("<i8").tobytes() for array in numbers))
    (tmp_path / "lazy.bin").write_bytes(pair.bin_path.read_bytes())
    found = imported([tmp_path / "lazy"], tmp_path / "data").path
    for suffix in (".bin", ".idx"):
        assert (found / f"data-00000{suffix}").read_bytes() == (SMALL / "datasets" / f"b2{suffix}").read_bytes()
    whole = (tmp_path / "lazy.idx").read_bytes()
    for size in (20, len(whole) - 8):
        (tmp_path / "lazy.idx").write_bytes(whole[:size])
        with pytest.raises(InputError, match="truncated"):
            imported([tmp_path / "lazy"], tmp_path / "cut")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("has_metadata", [True, False])
def test_a_dataset_of_datatrove_is_imported(tmp_path: Path, size: int, has_metadata: bool):
    ids = np.arange(10) % 7
    ends = np.array([3, 4, 10], dtype="<u8")
    path = tmp_path / "00000_tokens.ds"
    ids.astype(f"<u{size}").tofile(path)
    ends.tofile(f"{path}.index")
    if has_metadata:
        Path(f"{path}.metadata").write_text(f"gpt2|{size}\n10\n10 T")
    found = imported([path], tmp_path / "data")
    assert [TokenDataset(found.path).document(n).tolist() for n in range(3)] == [[0, 1, 2], [3], [4, 5, 6, 0, 1, 2]]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"truncated|neither 2 nor 4"):
        imported([path], tmp_path / "cut")


def test_an_import_is_checked_against_its_tokenizer(tmp_path: Path):
    data = ingest_files([str(write_corpus(tmp_path / "a.jsonl", texts(30)))], tmp_path / "data")
    found = imported([data.path / "data-00000"], tmp_path / "good", tokenizer=TOKENIZER)
    assert (found.summary["vocab_size"], found.summary["eod_id"], found.summary["append_eod"]) == (257, 256, True)
    assert found.summary["sources"][0]["documents_ending_in_eod"] == 30
    assert verify_path(found.path, found)[0] == []
    row = TokenDataset(found.path).document_rows(np.array([7]))[0]
    assert (row["file"], row["line"], row["bytes"]) == ("data-00000.bin", 8, None)
    with pytest.raises(InputError, match=r"token \d+ is \d+, outside the vocabulary of 257"):
        imported([SMALL / "datasets" / "a"], tmp_path / "bad", tokenizer=TOKENIZER)
    assert not (tmp_path / "bad").exists()


def test_numbers_that_are_no_token_ids_are_not_imported(tmp_path: Path):
    writer = PairWriter(tmp_path / "rewards", np.dtype("<f4"))
    writer.append(np.zeros(3, np.float32), np.array([3]))
    writer.finish()
    with pytest.raises(InputError, match="no token ids"):
        imported([tmp_path / "rewards"], tmp_path / "data")
    with pytest.raises(ConfigError, match="there is no file"):
        imported([tmp_path / "nothing"], tmp_path / "data")


def test_a_dataset_without_documents_is_not_imported(tmp_path: Path):
    PairWriter(tmp_path / "none", np.dtype("<u2")).finish()
    with pytest.raises(InputError, match="holds no document"):
        imported([tmp_path / "none"], tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_second_import_is_skipped_and_a_changed_source_is_not(tmp_path: Path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"a{suffix}").write_bytes((SMALL / "datasets" / f"a{suffix}").read_bytes())
    store = ArtifactStore(tmp_path / "store")
    config = ImportConfig(sources=(str(tmp_path / "a"),))
    first = IMPORT.run(config, store=store)
    assert IMPORT.run(config, store=ArtifactStore(tmp_path / "store")).path == first.path
    data = bytearray((tmp_path / "a.bin").read_bytes())
    data[10] ^= 1
    (tmp_path / "a.bin").write_bytes(data)
    assert IMPORT.run(config, store=ArtifactStore(tmp_path / "store")).fingerprint != first.fingerprint


def test_every_flipped_or_missing_byte_of_a_dataset_is_found(tmp_path: Path):
    artifact = ingest_files([str(corpus(tmp_path / "a.jsonl", 3))], tmp_path / "data")

    def is_sound() -> bool:
        try:
            return verify_path(artifact.path, read_artifact(artifact.path))[0] == []
        except InputError:
            return False

    assert is_sound()
    for path in sorted(file for file in artifact.path.rglob("*") if file.is_file() and "lock" not in file.name):
        data = path.read_bytes()
        step = 1 if path.suffix in (".bin", ".idx") else max(1, len(data) // 40)
        for place in range(0, len(data), step):
            changed = bytearray(data)
            changed[place] ^= 1 << (place % 8)
            path.write_bytes(changed)
            assert not is_sound(), f"{path.name}: a flip at byte {place} was not found"
        for size in {len(data) - 1, len(data) // 2, 0} - {len(data)}:
            path.write_bytes(data[:size])
            assert not is_sound(), f"{path.name}: cut to {size} bytes, and not found"
        path.write_bytes(data)
    assert is_sound()


def test_documents_are_shown_with_their_source(tmp_path: Path):
    data = ingest_files([str(corpus(tmp_path / "a.jsonl", 12))], tmp_path / "data")
    dataset = TokenDataset(data.path)
    numbers = choose_documents(dataset, 3, seed=0, subset="Books/3")
    assert len(numbers) == 3 and all(number % 2 for number in numbers)
    assert choose_documents(dataset, 99, seed=5) == list(range(12))
    for item in show_documents(dataset, numbers):
        assert (item.file, item.line, item.subset) == ("a.jsonl", item.document + 1, "Books/3")
        assert item.text == texts(12)[item.document] + "<|endoftext|>"
    with pytest.raises(ConfigError, match="no document 12; it has 12, from 0"):
        list(show_documents(dataset, [12]))


def test_lengths_are_counted_in_powers_of_two():
    rows = length_histogram(np.array([0, 0, 1, 2, 3, 4, 1023, 1024, 2**31 - 1], dtype=np.int32))
    assert [(row["from"], row["to"], row["sequences"]) for row in rows if row["sequences"]] == [
        *((0, 0, 2), (1, 1, 1), (2, 3, 2), (4, 7, 1), (512, 1023, 1), (1024, 2047, 1)),
        (2**30, 2**31 - 1, 1),
    ]
    assert sum(row["tokens"] for row in rows) == 1 + 2 + 3 + 4 + 1023 + 1024 + 2**31 - 1


def test_foreign_pairs_without_a_manifest_are_still_checked():
    assert verify_dataset(SMALL / "datasets" / "merged") == []


def test_every_broken_pair_of_a_folder_is_named(tmp_path: Path):
    for name in ("a", "b", "b2"):
        for suffix in (".bin", ".idx"):
            data = bytearray((SMALL / "datasets" / f"{name}{suffix}").read_bytes())
            (tmp_path / f"{name}{suffix}").write_bytes(data[:-1] if name != "a" and suffix == ".bin" else data)
    problems = verify_dataset(tmp_path)
    assert [any(name in problem for problem in problems) for name in ("b.bin", "b2.bin")] == [True, True]
