"""Pipeline files: which steps they become, and which mistakes are refused."""

from pathlib import Path

import pytest

from contracts.errors import ConfigError
from flows.pipeline import load_pipeline, steps_of
from flows.presets import presets, schema, write_preset

WHOLE = """
name: demo
corpus: {}
tokenizer: {vocab_size: 400}
ingest: {}
pretrain: {train_steps: 5}
reshape:
  - {name: pp2, pipeline_parallel: 2}
  - {name: hf, to: huggingface}
evaluate: {}
report: {}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pipeline.yaml"
    path.write_text(text)
    return path


def test_a_whole_chain_has_its_steps_in_order_with_their_inputs(tmp_path: Path) -> None:
    steps = {step.name: step for step in steps_of(load_pipeline(written(tmp_path, WHOLE)))}

    chain = ["corpus", "tokenizer", "ingest", "heldout", "pretrain", "reshape.pp2", "reshape.hf", "reimport.hf"]
    assert list(steps) == [*chain, "evaluate.pretrain", "evaluate.pp2", "evaluate.hf", "report"]
    assert steps["evaluate.hf"].inputs == {"checkpoint": "reimport.hf", "dataset": "heldout"}
    assert steps["ingest"].inputs == {"corpus": "corpus", "tokenizer": "tokenizer"}
    assert steps["reshape.hf"].stage.kind == "model"
    assert steps["report"].inputs["evaluation.pp2"] == "evaluate.pp2"


def test_a_clean_section_stands_between_corpus_and_what_reads_it(tmp_path: Path) -> None:
    text = WHOLE.replace("corpus: {}", "corpus: {}\nclean: {exact: true, decontaminate: [quiz.jsonl]}")
    config = load_pipeline(written(tmp_path, text))

    steps = {step.name: step for step in steps_of(config)}

    assert list(steps)[:4] == ["corpus", "clean", "tokenizer", "ingest"]
    assert steps["clean"].inputs == {"corpus": "corpus"}
    assert steps["clean"].stage.kind == "corpus"
    assert {steps[name].inputs["corpus"] for name in ("tokenizer", "ingest", "heldout")} == {"clean"}
    assert config.clean is not None
    assert config.clean.decontaminate == (str(tmp_path / "quiz.jsonl"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clean: {exact: true}\n", "clean has nothing to clean"),
        ("corpus: {}\nclean: {exact: true, sources: [a]}\n", r"clean\.sources and a corpus section are both given"),
        ("corpus: {}\nclean: {}\n", "clean asks for no step"),
        ("corpus: {}\nclean: {min_hash: {}}\n", r"unknown setting clean\.min_hash\. Did you mean minhash"),
        ("corpus: {}\nclean: {minhash: {bands: 7}}\n", r"clean\.minhash.*permutations is 120 and bands is 7"),
    ],
)
def test_a_clean_section_that_cannot_work_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, f"{text}tokenizer: {{}}\n")

    with pytest.raises(ConfigError, match=message):
        load_pipeline(path)


def test_only_the_chosen_checkpoints_are_measured(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE.replace("evaluate: {}", "evaluate: {of: [pp2]}"))

    names = [step.name for step in steps_of(load_pipeline(path))]

    assert [name for name in names if name.startswith(("evaluate", "reimport"))] == ["evaluate.pp2"]


def test_without_corpus_and_tokenizer_sections_ingest_names_both(tmp_path: Path) -> None:
    path = written(tmp_path, "ingest: {sources: [texts/*.jsonl], tokenizer: tok}\n")

    config = load_pipeline(path)

    assert [step.name for step in steps_of(config)] == ["ingest"]
    assert config.ingest.sources == (str(tmp_path / "texts" / "*.jsonl"),)
    assert config.ingest.tokenizer == str(tmp_path / "tok")
    assert config.store == str(tmp_path / "store")


def test_paths_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, WHOLE)
    monkeypatch.chdir("/")

    assert load_pipeline(path).store == str(tmp_path / "store")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ingest: {}\n", "there is no text"),
        ("ingest: {sources: [a]}\n", "there is no tokenizer"),
        ("corpus: {}\ntokenizer: {}\nreport: {}\n", "need a pretrain section"),
        (WHOLE.replace("corpus: {}", "corpus: {heldout_fraction: 0}"), "no held-out text"),
        (WHOLE.replace("name: hf", "name: pp2"), "two reshape targets have one name"),
        (WHOLE.replace("evaluate: {}", "evaluate: {of: [nothing]}"), "evaluate.of names nothing"),
        (
            WHOLE.replace("train_steps", "train_step"),
            "line 6: unknown setting pretrain.train_step. Did you mean train_steps",
        ),
        (WHOLE.replace("to: huggingface", "to: hugginface"), "line 9: reshape.1.to is 'hugginface'"),
        (WHOLE.replace("vocab_size: 400", "vocab_size: many"), "line 4: tokenizer.vocab_size is 'many'"),
        (WHOLE.replace("train_steps: 5", "layout: {tensor_parallel: 3}"), "leaves a remainder of 1"),
    ],
)
def test_a_mistake_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r".*") as refused:
        load_pipeline(written(tmp_path, text))

    assert message in str(refused.value)


def test_an_override_wins_over_the_file_and_is_named_when_wrong(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)

    config = load_pipeline(path, ["pretrain.optimizer.lr=3e-3", "reshape.1.name=out"])

    assert config.pretrain is not None
    assert config.pretrain.optimizer.lr == 3e-3
    assert config.reshape[1].name == "out"
    with pytest.raises(ConfigError, match=r"-s pretrain.optimizer.lrr=1: unknown setting"):
        load_pipeline(path, ["pretrain.optimizer.lrr=1"])


def test_every_preset_is_written_and_valid(tmp_path: Path) -> None:
    assert set(presets()) == {"demo", "llama"}
    for name in presets():
        path = write_preset(tmp_path / name, name)
        config = load_pipeline(path)
        assert config.store == str(tmp_path / name / "store")
        assert "corpus" in [step.name for step in steps_of(config)]


def test_the_schema_describes_every_setting() -> None:
    definitions = schema()["$defs"]

    assert isinstance(definitions, dict)
    for name, definition in definitions.items():
        for field, details in definition.get("properties", {}).items():
            assert details.get("description"), f"{name}.{field}"
