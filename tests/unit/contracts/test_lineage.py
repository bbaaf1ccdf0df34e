import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from small_artifacts import SAMPLE, OptimizerSettings, SampleSettings, make, make_chain, recipe_of

from contracts.artifact import InputEntry, read_artifact
from contracts.changes import flatten
from contracts.difference import artifact_changes, explain, explain_recipe
from contracts.lineage import ancestors, as_data, as_html, as_text, descendants
from contracts.store import ArtifactStore


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def test_ancestors_reach_from_an_evaluation_back_to_the_corpus(store: ArtifactStore):
    chain = make_chain(store)

    found = [(r.depth, r.name, r.item.kind) for r in ancestors(store, chain["evaluation"]) if not r.is_repeated]

    assert found == [
        (1, "checkpoint", "checkpoint"),
        (2, "checkpoint", "checkpoint"),
        (3, "index", "index"),
        (4, "dataset", "dataset"),
        (5, "corpus", "corpus"),
        (5, "tokenizer", "tokenizer"),
    ]


def test_descendants_reach_from_the_corpus_to_the_evaluation(store: ArtifactStore):
    chain = make_chain(store)

    found = {r.item.fingerprint for r in descendants(store, chain["corpus"])}

    assert found == {item.fingerprint for name, item in chain.items() if name != "corpus"}


def test_an_input_that_is_gone_is_named_with_its_place(store: ArtifactStore):
    chain = make_chain(store)
    shutil.rmtree(chain["dataset"].path)

    relatives = ancestors(store, chain["index"])

    assert isinstance(relatives[0].item, InputEntry)
    assert f"(gone; it was at dataset/{chain['dataset'].path.name})" in as_text(chain["index"], relatives)


def test_the_text_is_a_tree(store: ArtifactStore):
    chain = make_chain(store)

    lines = as_text(chain["dataset"], ancestors(store, chain["dataset"])).splitlines()

    assert lines[0] == f"dataset/{chain['dataset'].name}  [tokens 7]"
    assert lines[1].startswith("├─ corpus: corpus/")
    assert lines[2].startswith("└─ tokenizer: tokenizer/")
    assert lines[3].startswith("   └─ corpus: corpus/")
    assert lines[3].endswith("(see above)")


def test_the_page_needs_nothing_else_and_shows_text_as_text(store: ArtifactStore):
    corpus = make(store, "corpus", "corpus", summary={"title": "<script>alert(1)</script>"})
    dataset = make(store, "dataset", "ingest", {"corpus": corpus})
    index = make(store, "index", "index", {"dataset": dataset})

    page = as_html(dataset, up=ancestors(store, dataset), down=descendants(store, dataset))

    assert "<script>" not in page
    assert "http" not in page
    assert corpus.fingerprint in page
    assert index.fingerprint in page
    balance: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag != "meta":
                balance.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert balance.pop() == tag

    Parser().feed(page)
    assert balance == []


def test_lineage_as_data_names_depth_input_and_path(store: ArtifactStore):
    chain = make_chain(store)

    data = as_data(chain["index"], ancestors(store, chain["index"]))

    assert data["relatives"][0]["input"] == "dataset"
    assert data["relatives"][0]["path"] == str(chain["dataset"].path)


def test_descendants_are_found_by_reading_each_manifest_once(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch):
    corpus = make(store, "corpus", "corpus")
    made = make(store, "dataset", "ingest", {"corpus": corpus})
    for n in range(50):
        fingerprint = recipe_of(n=n).fingerprint
        path = store.root / "dataset" / f"pile-{fingerprint[:12]}"
        path.mkdir()
        (path / "manifest.json").write_text(replace(made.manifest, fingerprint=fingerprint).to_json())
    read: list[Path] = []
    monkeypatch.setattr("contracts.store.read_artifact", lambda path: read.append(path) or read_artifact(path))

    assert len(descendants(store, corpus)) == 51
    assert len(read) == len(set(read)) == 52


def test_explain_names_the_fields_that_differ_from_the_nearest_build(store: ArtifactStore):
    SAMPLE.run(SampleSettings(), store=store)
    SAMPLE.run(SampleSettings(num_layers=9, name="other"), store=store)
    changed = SampleSettings(optimizer=OptimizerSettings(lr=1e-3), num_workers=5)

    found = explain(store, SAMPLE, changed)

    assert [str(change) for change in found.changes] == ["config.optimizer.lr: 0.0003 -> 0.001"]
    assert found.nearest.summary == {"num_layers": 2}


def test_explain_says_that_a_stage_was_never_built(store: ArtifactStore):
    assert str(explain(store, SAMPLE, SampleSettings())) == "never built in this store"


def test_explain_names_an_input_that_changed(store: ArtifactStore):
    one, two = (make(store, "dataset", "ingest", config={"n": n}) for n in (1, 2))
    make(store, "index", "index", {"dataset": one})

    found = explain_recipe(store, "index", recipe_of("index", {"dataset": two}))

    assert [change.field for change in found.changes] == ["inputs.dataset"]


def test_two_artifacts_are_compared_by_recipe_execution_summary_and_files(store: ArtifactStore):
    one, two = (SAMPLE.run(SampleSettings(num_layers=n, num_workers=n), store=store) for n in (2, 3))

    found = artifact_changes(one, two)

    assert [c.field for c in found["recipe"]] == ["config.num_layers"]
    assert [c.field for c in found["execution"]] == ["config.num_workers"]
    assert [(c.field, c.old, c.new) for c in found["summary"]] == [("num_layers", 2, 3)]
    assert [c.field for c in found["files"]] == ["data.bin"]


def test_nested_values_are_flattened_to_joined_names():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [{"e": 2}], "f": (1, 2)}) == {
        "a.b": 1,
        "a.c": {},
        "d.0.e": 2,
        "f": [1, 2],
    }
