"""The data card says what a dataset holds, where it came from and what was left out."""

import json
from pathlib import Path

import pytest
from corpora import texts
from ingest_cases import ingest_files
from megatron_cases import SMALL

from contracts.artifact import Artifact
from contracts.errors import ConfigError
from contracts.store import ArtifactStore
from evaluation.config import DataCardConfig
from evaluation.data_card import CARD, PAGE, describe
from evaluation.stage import DATA_CARD
from preprocessing.dataset.token_dataset import TokenDataset


@pytest.fixture
def _dataset(tmp_path: Path) -> Artifact:
    found = texts(8)
    rows = [
        {"text": text, "meta": {"pile_set_name": "Github" if n % 2 else "<b>Books"}} for n, text in enumerate(found)
    ]
    lines = [json.dumps(row) for row in [*rows, rows[0], rows[3]]]
    lines += ["", '{"text": 5}', '{"text": 77}', '{"no": 1}']
    (tmp_path / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return ingest_files([str(tmp_path / "a.jsonl")], tmp_path / "data", on_error="quarantine")


def test_the_card_counts_what_is_there(_dataset: Artifact):
    card = describe(TokenDataset(_dataset.path))
    facts = card["facts"]
    assert (facts["lines"], facts["documents"], facts["empty"], facts["rejected"]) == (14, 10, 1, 3)
    assert facts["lines"] == facts["documents"] + facts["empty"] + facts["filtered"] + facts["rejected"]
    assert facts["duplicate_documents"] == 2
    rows = TokenDataset(_dataset.path).column("tokens")
    assert rows is not None and facts["duplicate_tokens"] == rows[0] + rows[3]
    assert facts["bytes_per_token"] == facts["bytes"] / facts["tokens"]
    assert sum(item["documents"] for item in card["subsets"]) == 10
    assert sum(item["share_of_tokens"] for item in card["subsets"]) == pytest.approx(1)
    assert sum(row["sequences"] for row in card["lengths"]) == 10
    assert sorted(card["rejects"].values()) == [1, 2]  # the two numbers are one reason
    assert card["sources"][0]["name"] == "a.jsonl"


def test_the_page_needs_no_other_file_and_escapes_what_comes_from_data(tmp_path: Path, _dataset: Artifact):
    made = DATA_CARD.run(
        DataCardConfig(), inputs={"dataset": _dataset}, store=ArtifactStore(tmp_path / "s", output=tmp_path / "card")
    )
    page = (made.path / PAGE).read_text()
    assert "&lt;b&gt;Books" in page and "<b>Books" not in page
    assert "data:image/png;base64," in page and "<script" not in page and 'src="http' not in page
    assert json.loads((made.path / CARD).read_text())["facts"]["documents"] == 10
    assert made.summary["duplicate_documents"] == 2
    assert {"tokens.png", "lengths.png", "bytes_per_token.png"} <= {path.name for path in made.path.iterdir()}


def test_a_foreign_pair_gets_the_card_that_can_be_made():
    card = describe(TokenDataset(SMALL / "datasets" / "b"))
    assert card["facts"] == {"documents": 64, "tokens": 5183}
    assert card["subsets"] == [] and card["rejects"] == {}


def test_a_card_of_nothing_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="--dataset"):
        DATA_CARD.run(DataCardConfig(), store=ArtifactStore(tmp_path / "s"))
