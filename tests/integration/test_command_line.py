"""Commands as a user types them: results, messages and exit codes."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Outcome, shardline

CASES = Path(__file__).parents[1] / "cases"
TOKENIZERS = CASES / "_tokenizers"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ingest(
    capsys: pytest.CaptureFixture[str], *files: str, tokenizer: str = "byte257", more: tuple[str, ...] = ()
) -> Outcome:
    sources = [CASES / file for file in files]
    words = ["--source", *sources, "--tokenizer", TOKENIZERS / tokenizer, "--output", "out", "--json", *more]
    return shardline(capsys, "ingest", *words)


def expected(case: str, *keys: str) -> dict[str, Any]:
    value = json.loads((CASES / case / "expected.json").read_text())
    for key in keys:
        value = value[key]
    assert isinstance(value, dict)
    return value


def assert_dataset(outcome: Outcome, wanted: dict[str, Any]) -> None:
    assert outcome.code == 0, outcome.err
    for key in ("documents", "tokens"):
        if key in wanted:
            assert outcome.data[key] == wanted[key]
    for suffix in ("bin", "idx"):
        if f"{suffix}_sha256" in wanted:
            digest = hashlib.sha256(Path(f"out/data-00000.{suffix}").read_bytes()).hexdigest()
            assert digest == wanted[f"{suffix}_sha256"], suffix


def assert_refused(outcome: Outcome, *parts: str) -> None:
    assert outcome.code != 0
    for part in parts:
        assert part in outcome.err, outcome.err
    assert not Path("out").exists()


GOOD = [
    ("ING-01", (), ("corpus.jsonl",), ()),
    ("ING-04", ("key_content",), ("corpus.jsonl",), ("--text-key", "content")),
    ("ING-04", ("key_meta_text",), ("corpus.jsonl",), ("--text-key", "meta.text")),
    ("ING-07", (), ("a.jsonl", "b.jsonl"), ()),
    ("ING-11", (), ("corpus.jsonl.zst",), ()),
    ("ING-11", (), ("split_inside_record.jsonl.zst",), ()),
    ("ING-13", ("good",), ("good_two_members.jsonl.gz",), ()),
    ("ING-48", (), ("gzip_named.jsonl",), ()),
    ("ING-48", (), ("plain_named.jsonl.gz",), ()),
    ("ING-48", (), ("zstd_named.jsonl.gz",), ()),
    ("ING-49", (), ("corpus.jsonl",), ()),
    ("ING-20", ("nul_in_text",), ("nul_in_text.jsonl",), ()),
    ("ING-45", ("byte257",), ("corpus.jsonl",), ()),
]


@pytest.mark.parametrize(("case", "keys", "files", "more"), GOOD)
def test_a_case_of_good_input(
    capsys: pytest.CaptureFixture[str], case: str, keys: tuple[str, ...], files: tuple[str, ...], more: tuple[str, ...]
) -> None:
    assert_dataset(ingest(capsys, *(f"{case}/{file}" for file in files), more=more), expected(case, *keys))


SKIPPED = [
    ("ING-03", ("skip",), "corpus.jsonl"),
    ("ING-05", ("skip",), "corpus.jsonl"),
    ("ING-17", ("skip",), "corpus.jsonl"),
    ("ING-20", ("nul_tail_skip",), "nul_tail.jsonl"),
]


@pytest.mark.parametrize(("case", "keys", "file"), SKIPPED)
def test_a_bad_record_is_set_aside_when_asked(
    capsys: pytest.CaptureFixture[str], case: str, keys: tuple[str, ...], file: str
) -> None:
    outcome = ingest(capsys, f"{case}/{file}", more=("--on-error", "quarantine"))

    assert_dataset(outcome, expected(case, *keys))
    assert outcome.data["lines"] == sum(outcome.data[key] for key in ("documents", "empty", "filtered", "rejected"))
    rejects = [json.loads(line) for line in Path("out/rejects.jsonl").read_text().splitlines()]
    assert len(rejects) == outcome.data["rejected"] > 0


REFUSED = [
    ("ING-03", "corpus.jsonl", ("corpus.jsonl", "line 3", "text", "content", "id")),
    ("ING-04", "corpus.jsonl", ("content", "id", "meta")),
    ("ING-05", "corpus.jsonl", ("corpus.jsonl", "line 4")),
    ("ING-13", "truncated.jsonl.gz", ("truncated.jsonl.gz", "end")),
    ("ING-16", "corpus.jsonl", ("line 1",)),
    ("ING-17", "corpus.jsonl", ("corpus.jsonl", "line 2")),
    ("ING-20", "nul_tail.jsonl", ("line 3", "NUL")),
]


@pytest.mark.parametrize(("case", "file", "parts"), REFUSED)
def test_bad_input_is_refused_by_default_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], case: str, file: str, parts: tuple[str, ...]
) -> None:
    assert_refused(ingest(capsys, f"{case}/{file}", more=("--workers", "2")), *parts)


def test_ing_16_and_17_invalid_unicode_is_replaced_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    replace = ("-s", "invalid_unicode=replace")

    assert_dataset(ingest(capsys, "ING-16/corpus.jsonl", more=replace), expected("ING-16", "replace"))


def test_ing_22_bos_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = ingest(capsys, "ING-22/corpus.jsonl", tokenizer="byte258_bos", more=("-s", "add_bos=true"))

    assert_dataset(outcome, expected("ING-22", "bos"))


def test_ing_24_wide_ids_get_wide_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert_dataset(ingest(capsys, "ING-24/corpus.jsonl", tokenizer="word65550"), expected("ING-24"))


@pytest.mark.parametrize("split", ["-1,1,0", "90,abc5,5", "0,0,0", "90,5,5,5", "", "nan,1,0", "inf,1,0", "99;1;0"])
def test_ing_27_a_bad_split_is_refused_and_quoted(capsys: pytest.CaptureFixture[str], split: str) -> None:
    assert ingest(capsys, "ING-27/hundred_docs.jsonl").code == 0

    outcome = shardline(
        capsys, "index", "--dataset", "out", "--seq-length", "4", "--samples", "3", f"--split={split}", "--output", "ix"
    )

    assert outcome.code == 2
    assert split in outcome.err
    assert not Path("ix").exists()


def test_ing_27_a_split_gives_the_documents_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert ingest(capsys, "ING-27/hundred_docs.jsonl").code == 0

    outcome = shardline(
        capsys, "index", "--dataset", "out", "--seq-length", 4, "--split", "50,50", "-o", "ix", "--json"
    )

    assert outcome.code == 0, outcome.err
    assert Path("ix/train_document_index.npy").is_file()
    assert Path("ix/valid_shuffle_index.npy").is_file()


def test_the_same_command_again_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    ingest(capsys, "ING-01/corpus.jsonl")
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")}

    again = ingest(capsys, "ING-01/corpus.jsonl")

    assert again.code == 0
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")} == before


def test_another_result_is_not_written_over_an_output_folder(capsys: pytest.CaptureFixture[str]) -> None:
    ingest(capsys, "ING-01/corpus.jsonl")

    outcome = ingest(capsys, "ING-49/corpus.jsonl")

    assert outcome.code == 2
    assert "out holds another artifact" in outcome.err


def test_verify_names_a_flipped_byte_and_inspect_still_works(capsys: pytest.CaptureFixture[str]) -> None:
    ingest(capsys, "ING-01/corpus.jsonl")
    assert shardline(capsys, "verify", "out").code == 0
    data = bytearray(Path("out/data-00000.bin").read_bytes())
    data[4] ^= 1
    Path("out/data-00000.bin").write_bytes(data)

    outcome = shardline(capsys, "verify", "out")

    assert outcome.code == 1
    assert "data-00000.bin" in outcome.out
    assert shardline(capsys, "inspect", "out", "--json").data["documents"] == 3


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (("frobnicate",), 2, "No such command"),
        (("run", "missing.yaml"), 2, "missing.yaml"),
        (("ingest", "--tokenizer", "nothing", "--source", "x"), 2, "nothing"),
        (("inspect", "nothing-here"), 2, "nothing-here"),
        (("lineage", "nothing-here"), 2, "nothing-here"),
        (("init", "--preset", "nothing"), 2, "Presets: demo, llama"),
        (("score", "--checkpoint", "nothing"), 2, "--input"),
        (("evaluate", "--checkpoint", "nothing"), 2, "nothing"),
        (("reshape", "--checkpoint", "nothing", "--output", "o"), 2, "nothing"),
        (("pretrain", "-s", "optimizer.lr=fast", "--dataset", "x"), 2, "x"),
        (("index", "--seq-length", "0"), 2, "seq_length"),
        (("submit", "missing.yaml"), 2, "missing.yaml"),
        (("deploy",), 2, "shardline up"),
    ],
)
def test_wrong_usage_has_one_message_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, part: str
) -> None:
    outcome = shardline(capsys, *words)

    assert outcome.code == code, outcome.err
    assert outcome.err.startswith("error: ")
    assert part in outcome.err


def test_help_of_every_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    chain = ["init", "run", "plan", "status", "submit"]
    single = ["corpus", "tokenizer", "ingest", "index", "pretrain", "reshape", "evaluate", "score", "report"]
    study = ["inspect", "verify", "diff", "lineage", "trace", "estimate", "schema"]
    commands = [*chain, *single, *study, "doctor", "up", "down", "deploy"]

    for command in commands:
        outcome = shardline(capsys, command, "--help")
        assert outcome.code == 0
        assert "Example:" in outcome.out, command


def test_init_writes_a_file_that_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert shardline(capsys, "init", "here").code == 0
    assert json.loads(Path("here/pipeline.schema.json").read_text())["title"] == "PipelineConfig"

    planned = shardline(capsys, "plan", "here/pipeline.yaml", "-s", "corpus.max_bytes=100_000", "--json")

    assert planned.code == 3
    stages = [row["stage"] for row in planned.data["stages"]]
    assert stages[:5] == ["corpus", "tokenizer", "ingest", "heldout", "pretrain"]
    assert shardline(capsys, "init", "here").code == 2


def test_explain_names_the_changed_setting(capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.yaml").write_text(
        f"store: s\ntracking: {{is_on: false}}\n"
        f"ingest: {{sources: [{CASES / 'ING-01' / 'corpus.jsonl'}], tokenizer: {TOKENIZERS / 'byte257'}}}\n"
    )
    assert shardline(capsys, "run", "p.yaml").code == 0
    assert shardline(capsys, "plan", "p.yaml").code == 0

    outcome = shardline(capsys, "plan", "p.yaml", "--explain", "-s", "ingest.append_eod=false")

    assert outcome.code == 3
    assert "config.append_eod: true -> false" in outcome.out.lower()


def test_a_store_can_be_moved(capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.yaml").write_text(
        f"store: s\ntracking: {{is_on: false}}\n"
        f"ingest: {{sources: [{CASES / 'ING-01' / 'corpus.jsonl'}], tokenizer: {TOKENIZERS / 'byte257'}}}\n"
    )
    assert shardline(capsys, "run", "p.yaml").code == 0
    Path("s").rename("moved")

    assert shardline(capsys, "plan", "p.yaml", "-s", "store=moved").code == 0


def test_estimate_says_parameters_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert shardline(capsys, "init", "here").code == 0

    estimate = shardline(capsys, "estimate", "here/pipeline.yaml", "--json").data

    assert estimate["parameters"] == 4273664
    assert estimate["memory_per_rank_bytes"] > 3 * 4 * estimate["parameters_per_rank"]


def test_doctor_finds_this_machine_fit(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = shardline(capsys, "doctor", "--json")

    assert outcome.code == 0
    assert {check["name"] for check in outcome.data["checks"]} >= {"python", "cores", "memory", "store", "devices"}


def test_several_words_may_follow_one_flag() -> None:
    from flows.cli import spread

    words = ["ingest", "--source", "a", "b", "--tokenizer", "t", "--source", "c", "-s", "x=1"]

    alone = ["--source", "a", "--source", "b", "--tokenizer", "t", "--source", "c", "-s", "x=1"]
    assert spread(words) == ["ingest", *alone]


def test_the_flags_of_a_blend_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    for name, case in (("a", "ING-27/hundred_docs.jsonl"), ("b", "ING-27/hundred_docs.jsonl")):
        source = ("--source", CASES / case, "--tokenizer", TOKENIZERS / "byte257", "--output", name)
        assert shardline(capsys, "ingest", *source).code == 0

    blend = ("--dataset", "a", "b", "--weights", ".3", ".7", "--split", "90,10,0", "--samples", "50")
    outcome = shardline(capsys, "index", *blend, "--seq-length", "4", "--output", "blend", "--json")

    assert outcome.code == 0, outcome.err
    assert Path("blend/train_dataset_index.npy").is_file()
    assert Path("blend/valid_dataset_sample_index.npy").is_file()


def test_an_artifact_of_another_kind_is_refused_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    ingest(capsys, "ING-01/corpus.jsonl")

    outcome = shardline(capsys, "report", "--checkpoint", "out", "--output", "page")

    assert outcome.code == 2
    assert "out is a dataset; a checkpoint or model is needed here" in outcome.err


def test_paths_in_a_settings_file_are_relative_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sub").mkdir()
    Path("sub/texts.jsonl").write_bytes((CASES / "ING-01" / "corpus.jsonl").read_bytes())
    Path("sub/ingest.yaml").write_text(f"sources: [texts.jsonl]\ntokenizer: {TOKENIZERS / 'byte257'}\n")

    outcome = shardline(capsys, "ingest", "--config", "sub/ingest.yaml", "--output", "out", "--json")

    assert outcome.data["documents"] == 3


def test_a_live_flow_beats_often_enough_for_the_rule_that_finds_dead_ones(tmp_path: Path) -> None:
    from flows.servers import SILENT_S, Servers, client_environment

    environment = client_environment(Servers("http://127.0.0.1:1", "http://127.0.0.1:2", {}), tmp_path)

    assert 3 * int(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) <= SILENT_S


def test_a_second_settings_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text("train_steps: 3\n")
    outcome = shardline(capsys, "pretrain", "--config", "a.yaml", "-c", "a.yaml", "--dataset", "x")

    assert outcome.code == 2 and "--config is given twice" in outcome.err


def test_listed_settings_name_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = shardline(capsys, "schema", "pretrain", "--text")

    assert "precision [float32] (one of float32, bf16, fp16, float64)" in outcome.out
    assert "layout.shard [optimizer] (one of none, optimizer, gradients, parameters)" in outcome.out
