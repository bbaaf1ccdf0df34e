"""The cases ING-*: bad, odd and hard corpora, each with the exact bytes that come out."""

import json
from pathlib import Path

import pytest
from ingest_cases import CASES, assert_outcome, case_path, expected, ingest_files

from contracts.errors import ConfigError, InputError, RecordError
from preprocessing.dataset.indexed_dataset import IndexedDataset
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.reading.damage import DamagedStreamError


def rejects_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "rejects.jsonl").read_text(encoding="utf-8").splitlines()]


def test_ing_01_empty_texts_are_counted_and_not_written(tmp_path: Path):
    artifact = ingest_files(case_path("ING-01", "corpus.jsonl"), tmp_path / "out")

    assert_outcome(artifact, expected("ING-01"))
    assert (artifact.summary["lines"], artifact.summary["empty"]) == (5, 2)
    dataset = IndexedDataset(artifact.path / "data-00000")
    assert [dataset.sequence(n).tolist() for n in range(3)] == [
        [72, 101, 108, 108, 111, 256],
        [87, 111, 114, 108, 100, 46, 256],
        [32, 256],
    ]


def test_ing_01_empty_texts_can_be_kept_as_end_of_document_only(tmp_path: Path):
    artifact = ingest_files(case_path("ING-01", "corpus.jsonl"), tmp_path / "out", keep_empty=True)

    assert (artifact.summary["documents"], artifact.summary["tokens"], artifact.summary["empty"]) == (5, 17, 0)


def test_ing_03_a_missing_key_stops_with_file_line_key_and_keys_present(tmp_path: Path):
    with pytest.raises(RecordError) as caught:
        ingest_files(case_path("ING-03", "corpus.jsonl"), tmp_path / "out", workers=2)

    message = str(caught.value)
    assert "corpus.jsonl, line 3: no key 'text'; keys present: content, id" in message
    assert not (tmp_path / "out").exists()


def test_ing_03_quarantine_sets_the_record_aside_and_goes_on(tmp_path: Path):
    artifact = ingest_files(case_path("ING-03", "corpus.jsonl"), tmp_path / "out", workers=2, on_error="quarantine")

    assert_outcome(artifact, expected("ING-03")["skip"])
    assert (artifact.summary["lines"], artifact.summary["rejected"]) == (4, 1)
    (reject,) = rejects_of(artifact.path)
    lines = (CASES / "ING-03" / "corpus.jsonl").read_bytes().splitlines(keepends=True)
    assert (reject["file"], reject["line"], reject["byte_offset"]) == ("corpus.jsonl", 3, len(b"".join(lines[:2])))


@pytest.mark.parametrize("on_error", ["stop", "quarantine"])
def test_ing_04_a_text_key_that_no_record_has_is_never_a_success(tmp_path: Path, on_error: str):
    with pytest.raises(InputError) as caught:
        ingest_files(case_path("ING-04", "corpus.jsonl"), tmp_path / "out", on_error=on_error)

    assert "content, id, meta" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("key", "name"), [("content", "key_content"), ("meta.text", "key_meta_text")])
def test_ing_04_plain_and_nested_text_keys_are_read(tmp_path: Path, key: str, name: str):
    artifact = ingest_files(case_path("ING-04", "corpus.jsonl"), tmp_path / "out", text_key=key)

    assert_outcome(artifact, expected("ING-04")[name])


def test_ing_05_a_line_cut_inside_a_character_stops(tmp_path: Path):
    with pytest.raises(RecordError, match=r"corpus\.jsonl, line 4: .*not valid UTF-8; the record is incomplete"):
        ingest_files(case_path("ING-05", "corpus.jsonl"), tmp_path / "out")

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("invalid_unicode", ["error", "replace"])
def test_ing_05_a_line_cut_inside_a_character_is_set_aside(tmp_path: Path, invalid_unicode: str):
    artifact = ingest_files(
        case_path("ING-05", "corpus.jsonl"),
        tmp_path / "out",
        on_error="quarantine",
        invalid_unicode=invalid_unicode,
    )

    assert_outcome(artifact, expected("ING-05")["skip"])
    assert [reject["line"] for reject in rejects_of(artifact.path)] == [4]


def test_ing_07_byte_order_marks_are_no_part_of_documents(tmp_path: Path):
    artifact = ingest_files(case_path("ING-07", "a.jsonl", "b.jsonl"), tmp_path / "out")

    assert_outcome(artifact, expected("ING-07"))
    assert artifact.summary["byte_order_marks"] == 3
    assert IndexedDataset(artifact.path / "data-00000").tokens[0] == 65


@pytest.mark.parametrize("name", ["corpus.jsonl.zst", "split_inside_record.jsonl.zst"])
def test_ing_11_all_zstd_frames_are_read(tmp_path: Path, name: str):
    artifact = ingest_files(case_path("ING-11", name), tmp_path / "out")

    assert_outcome(artifact, expected("ING-11"))


def test_ing_12_junk_after_the_last_frame_stops_or_is_listed(tmp_path: Path):
    source = case_path("ING-12", "trailing_junk.jsonl.zst")
    with pytest.raises(DamagedStreamError, match=r"trailing_junk\.jsonl\.zst: .*bytes that are not zstd"):
        ingest_files(source, tmp_path / "strict")

    artifact = ingest_files(source, tmp_path / "out", on_error="quarantine")
    assert (artifact.summary["documents"], artifact.summary["tokens"]) == (1, 3)
    assert not artifact.summary["sources"][0]["damaged"]["is_truncated"]


def test_ing_12_files_without_records_are_never_a_silent_success(tmp_path: Path):
    with pytest.raises(InputError, match=r"zero_bytes\.jsonl\.zst: holds no byte"):
        ingest_files(case_path("ING-12", "zero_bytes.jsonl.zst"), tmp_path / "a")
    with pytest.raises(InputError, match="no record of 1 files gave a document"):
        ingest_files(case_path("ING-12", "empty_frame.jsonl.zst"), tmp_path / "b")

    good = [*case_path("ING-12", "empty_frame.jsonl.zst"), *case_path("ING-11", "corpus.jsonl.zst")]
    artifact = ingest_files(good, tmp_path / "c")
    assert [source["documents"] for source in artifact.summary["sources"]] == [0, 6]


def test_ing_13_all_gzip_members_are_read(tmp_path: Path):
    artifact = ingest_files(case_path("ING-13", "good_two_members.jsonl.gz"), tmp_path / "out")

    assert_outcome(artifact, expected("ING-13")["good"])


def test_ing_13_a_truncated_stream_stops(tmp_path: Path):
    with pytest.raises(DamagedStreamError, match=r"truncated\.jsonl\.gz: the gzip stream ends early"):
        ingest_files(case_path("ING-13", "truncated.jsonl.gz"), tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_ing_13_quarantine_lists_the_truncated_file_with_the_records_taken(tmp_path: Path):
    artifact = ingest_files(
        case_path("ING-13", "truncated.jsonl.gz", "good_two_members.jsonl.gz"),
        tmp_path / "out",
        on_error="quarantine",
    )

    truncated, good = artifact.summary["sources"]
    assert truncated["damaged"]["is_truncated"]
    assert 0 < truncated["documents"] < 200
    assert good["documents"] == 4
    assert artifact.summary["damaged_files"] == 1


def test_ing_16_lone_surrogates_stop(tmp_path: Path):
    with pytest.raises(RecordError, match=r"corpus\.jsonl, line 1: the text holds the lone surrogate U\+D8"):
        ingest_files(case_path("ING-16", "corpus.jsonl"), tmp_path / "out")


def test_ing_16_lone_surrogates_are_replaced_and_counted(tmp_path: Path):
    artifact = ingest_files(case_path("ING-16", "corpus.jsonl"), tmp_path / "out", invalid_unicode="replace")

    assert_outcome(artifact, expected("ING-16")["replace"])
    assert (artifact.summary["replaced_characters"], artifact.summary["replaced_records"]) == (3, 3)
    dataset = IndexedDataset(artifact.path / "data-00000")
    assert dataset.sequence(2).tolist() == [240, 159, 152, 128, 256]


def test_ing_17_invalid_utf8_stops_at_its_line(tmp_path: Path):
    with pytest.raises(RecordError, match=r"corpus\.jsonl, line 2: byte 0x.. at position \d+ of the line"):
        ingest_files(case_path("ING-17", "corpus.jsonl"), tmp_path / "out")


def test_ing_17_invalid_utf8_is_set_aside(tmp_path: Path):
    artifact = ingest_files(case_path("ING-17", "corpus.jsonl"), tmp_path / "out", on_error="quarantine")

    assert_outcome(artifact, expected("ING-17")["skip"])
    assert [reject["line"] for reject in rejects_of(artifact.path)] == [2, 3]


def test_ing_17_invalid_utf8_is_replaced(tmp_path: Path):
    artifact = ingest_files(case_path("ING-17", "corpus.jsonl"), tmp_path / "out", invalid_unicode="replace")

    assert_outcome(artifact, expected("ING-17")["replace"])
    assert artifact.summary["replaced_records"] == 2


def test_ing_20_nul_inside_a_text_is_kept(tmp_path: Path):
    artifact = ingest_files(case_path("ING-20", "nul_in_text.jsonl"), tmp_path / "out")

    assert_outcome(artifact, expected("ING-20")["nul_in_text"])
    assert IndexedDataset(artifact.path / "data-00000").sequence(0).tolist() == [97, 98, 0, 99, 100, 256]


def test_ing_20_a_tail_of_nul_bytes_stops(tmp_path: Path):
    with pytest.raises(RecordError, match=r"nul_tail\.jsonl, line 3: 64 NUL bytes"):
        ingest_files(case_path("ING-20", "nul_tail.jsonl"), tmp_path / "out")


def test_ing_20_a_tail_of_nul_bytes_is_set_aside(tmp_path: Path):
    artifact = ingest_files(case_path("ING-20", "nul_tail.jsonl"), tmp_path / "out", on_error="quarantine")

    assert_outcome(artifact, expected("ING-20")["nul_tail_skip"])
    assert artifact.summary["rejected"] == 1


def test_ing_22_no_bos_unless_asked_for(tmp_path: Path):
    artifact = ingest_files(case_path("ING-22", "corpus.jsonl"), tmp_path / "out", tokenizer="byte258_bos")

    assert_outcome(artifact, expected("ING-22")["no_bos"])
    assert artifact.summary["add_bos"] is False


def test_ing_22_one_bos_per_document_when_asked_for(tmp_path: Path):
    artifact = ingest_files(
        case_path("ING-22", "corpus.jsonl"), tmp_path / "out", tokenizer="byte258_bos", add_bos=True
    )

    assert_outcome(artifact, expected("ING-22")["bos"])
    assert IndexedDataset(artifact.path / "data-00000").tokens.tolist() == [257, 97, 98, 256, 257, 99, 256]
    assert artifact.summary["add_bos"] is True


def test_ing_22_the_same_text_gives_the_same_ids_without_eod(tmp_path: Path):
    artifact = ingest_files(
        case_path("ING-22", "corpus.jsonl"), tmp_path / "out", tokenizer="byte258_bos", append_eod=False
    )

    assert IndexedDataset(artifact.path / "data-00000").tokens.tolist() == [97, 98, 99]


def test_ing_23_eod_without_such_a_token_is_refused_before_any_record(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"byte256_noeos defines no end-of-document token.*ingest\.eod_token"):
        ingest_files(case_path("ING-23", "corpus.jsonl"), tmp_path / "out", tokenizer="byte256_noeos")

    assert not (tmp_path / "out").exists()


def test_ing_23_without_eod_such_a_tokenizer_works(tmp_path: Path):
    artifact = ingest_files(
        case_path("ING-23", "corpus.jsonl"), tmp_path / "out", tokenizer="byte256_noeos", append_eod=False
    )

    assert (artifact.summary["documents"], artifact.summary["tokens"]) == (1, 2)


def test_ing_24_ids_above_65535_are_int32(tmp_path: Path):
    artifact = ingest_files(case_path("ING-24", "corpus.jsonl"), tmp_path / "out", tokenizer="word65550")

    assert_outcome(artifact, expected("ING-24"))
    assert (artifact.path / "data-00000.idx").read_bytes()[17] == 4
    dataset = TokenDataset(artifact.path)
    assert dataset.sequence(1).tolist()[:4] == [65535, 65536, 65549, 65490]
    assert artifact.summary["vocab_size"] == 65550


def test_ing_45_white_space_and_decomposed_characters_survive(tmp_path: Path):
    artifact = ingest_files(case_path("ING-45", "corpus.jsonl"), tmp_path / "out")

    assert_outcome(artifact, expected("ING-45")["byte257"])
    lines = (CASES / "ING-45" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    dataset = TokenDataset(artifact.path)
    texts = [dataset.tokenizer.decode(dataset.sequence(n)[:-1]) for n in range(4)]
    assert texts == [json.loads(line)["text"] for line in lines]
    assert artifact.summary["round_trip"] == {"checked": 4, "differs": 0, "examples": []}


def test_ing_45_a_lossy_normalizer_is_reported(tmp_path: Path):
    artifact = ingest_files(case_path("ING-45", "corpus.jsonl"), tmp_path / "out", tokenizer="byte257_nfc")

    assert_outcome(artifact, expected("ING-45")["byte257_nfc"])
    assert artifact.summary["round_trip"]["examples"] == [{"file": "corpus.jsonl", "line": 3}]


@pytest.mark.parametrize("name", ["plain_named.jsonl.gz", "gzip_named.jsonl", "zstd_named.jsonl.gz"])
def test_ing_48_files_are_read_by_content_not_by_name(tmp_path: Path, name: str):
    artifact = ingest_files(case_path("ING-48", name), tmp_path / "out")

    assert_outcome(artifact, expected("ING-48"))


def test_ing_49_the_last_of_duplicate_keys_wins(tmp_path: Path):
    artifact = ingest_files(case_path("ING-49", "corpus.jsonl"), tmp_path / "out")

    assert_outcome(artifact, expected("ING-49"))
