"""The Pile by name: its files, its subsets, and what was published of them."""

from pathlib import Path

import pytest

from contracts.errors import ConfigError
from preprocessing.reading.pile import PARTS, SUBSETS, compare_with_published, doubts_about, is_of_the_pile
from preprocessing.reading.sources import SourceSettings, expand_sources

GIB = 2**30


def whole_pile(share: float = 1.0) -> dict[str, dict[str, int]]:
    return {
        name: {
            "bytes": int(row.raw_gib * row.epochs * GIB * share),
            "documents": int(row.raw_gib * row.epochs * GIB * share / row.mean_document_kib / 1024),
        }
        for name, row in SUBSETS.items()
    }


def test_the_published_numbers_add_up():
    assert len(SUBSETS) == 22
    assert sum(row.raw_gib for row in SUBSETS.values()) == pytest.approx(825.18, abs=0.1)
    assert sum(row.raw_gib * row.epochs for row in SUBSETS.values()) == pytest.approx(1254.20, abs=0.2)
    assert sum(row.weight_percent for row in SUBSETS.values()) == pytest.approx(100, abs=0.1)
    for row in SUBSETS.values():
        assert row.raw_gib * row.epochs / 1254.20 * 100 == pytest.approx(row.weight_percent, abs=0.01)


def test_the_files_are_taken_by_name_and_in_order(tmp_path: Path):
    for name in (*PARTS["train"], *PARTS["val"], "train/extra.jsonl.zst"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    files = expand_sources([str(tmp_path)], SourceSettings(preset="pile"))
    assert [file.name for file in files] == [f"train/{n:02d}.jsonl.zst" for n in range(30)]
    (val,) = expand_sources([str(tmp_path)], SourceSettings(preset="pile", part="val"))
    assert val.name == "val.jsonl.zst"


def test_missing_files_are_named(tmp_path: Path):
    (tmp_path / "train").mkdir()
    for name in PARTS["train"][:28]:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"2 of the 30 files.*are missing: train/28.jsonl.zst, train/29.jsonl.zst\. Copy"
    ):
        expand_sources([str(tmp_path)], SourceSettings(preset="pile"))
    with pytest.raises(ConfigError, match="the Pile has no part 'heldout'; it has train, val, test"):
        expand_sources([str(tmp_path)], SourceSettings(preset="pile", part="heldout"))


@pytest.mark.parametrize("share", [1.0, 1 / 30])
def test_the_pile_and_a_fair_share_of_it_raise_no_doubt(share: float):
    found = whole_pile(share)
    assert doubts_about(found) == []
    table = compare_with_published(found)
    assert table["Pile-CC"]["ratio"] == pytest.approx(share, abs=1e-5)
    assert table["Pile-CC"]["bytes_percent"] == pytest.approx(18.11, abs=0.02)
    assert is_of_the_pile(found)


def test_what_differs_from_the_published_sizes_is_named():
    found = whole_pile()
    del found["Books3"]
    found["ArXiv"]["bytes"] //= 2
    found["ArXiv"]["documents"] //= 2
    found["Enron Emails"]["documents"] *= 2
    found["News"] = {"bytes": 1, "documents": 1}
    doubts = "; ".join(doubts_about(found, tolerance=0.2))
    assert "News is no subset of the Pile" in doubts
    assert "Books3 is absent" in doubts
    assert "ArXiv is 5" in doubts and "published are 8.96 %" in doubts
    assert "documents of Enron Emails have 0.89 KiB, published are 1.78" in doubts
    assert not is_of_the_pile(found)
