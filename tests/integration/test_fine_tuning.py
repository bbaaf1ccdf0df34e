"""Fine-tuning on conversations: from records to rows to a model that learned what is said."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import shardline

from preprocessing.config import IndexConfig
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.conversations import NO_LABEL, PADDING, ConversationSamples
from preprocessing.samples.index import build_index
from training.metrics import METRICS, read

WORDS = ["red", "green", "blue", "black", "white", "grey"]


def _records(count: int) -> list[dict[str, Any]]:
    draw = random.Random(3)
    found = []
    for _ in range(count):
        words = draw.choices(WORDS, k=draw.randint(1, 6))
        found.append({"prompt": f"Repeat: {' '.join(words)}\n", "response": " ".join(words)})
    return found


def _write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def tokenizer(store: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    from contracts.store import ArtifactStore
    from preprocessing.config import TokenizerConfig
    from preprocessing.stages import TOKENIZER

    texts = [{"text": item["prompt"] + item["response"]} for item in _records(60)]
    source = _write(tmp_path_factory.mktemp("texts") / "a.jsonl", texts)
    settings = TokenizerConfig(sources=(str(source),), vocab_size=300)
    return str(TOKENIZER.run(settings, store=ArtifactStore(store), label="t").path)


@pytest.fixture
def dataset(tmp_path: Path, store: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> TokenDataset:
    source = _write(tmp_path / "talk.jsonl", _records(80))
    words = ["--source", source, "--tokenizer", tokenizer, "--prompt", "{prompt}", "--response", "{response}"]
    outcome = shardline(capsys, "ingest", *words, "--store", store, "-o", tmp_path / "data", "--json", "--no-track")
    assert outcome.code == 0, outcome.err
    assert outcome.data["documents"] == 80
    return TokenDataset(tmp_path / "data")


def _index(dataset: TokenDataset, folder: Path, **settings: Any) -> dict[str, Any]:
    config = IndexConfig.model_validate({"objective": "sft", **settings})
    return build_index(config, [dataset], folder, note=lambda _: None)


def test_every_conversation_stands_once_in_an_epoch_with_labels_where_something_is_said(
    dataset: TokenDataset, tmp_path: Path
) -> None:
    summary = _index(dataset, tmp_path / "index", seq_length=64)
    samples = ConversationSamples(tmp_path / "index", "train", [dataset])
    decode = dataset.tokenizer.decode

    rows = samples.rows(range(len(samples)))

    read_back = []
    for row in range(len(samples)):
        numbers = rows["documents"][row]
        for number, span in zip(sorted(set(numbers.tolist()) - {PADDING}), samples.documents_of(row), strict=True):
            here = np.flatnonzero(numbers == number)
            prompt, response = (decode(part.tolist()) for part in dataset.sequences_of(span.document))
            labels = rows["labels"][row, here]
            said = labels[labels != NO_LABEL].tolist()
            inputs = rows["inputs"][row, here].tolist()
            assert decode(said) == response and response.endswith("<|endoftext|>")
            assert decode([*inputs, said[-1]]) == prompt + response
            assert rows["positions"][row, here].tolist() == list(range(len(here)))
            read_back.append(span.document)
        assert (rows["labels"][row, numbers == PADDING] == NO_LABEL).all()
    assert sorted(read_back) == list(range(80))
    assert summary["train_samples"] < 80  # several share a row
    assert summary["splits"]["train"]["documents_cut"] == 0


def test_long_conversations_are_cut_and_counted_and_single_rows_hold_one(dataset: TokenDataset, tmp_path: Path) -> None:
    longest = max(int(dataset.sequences_of(n)[0].size) for n in range(80))

    cut = _index(dataset, tmp_path / "cut", seq_length=longest - 1, split="100,0,0")["splits"]["train"]
    single = _index(dataset, tmp_path / "one", seq_length=64, sft={"packs": False}, samples=200)

    assert cut["documents_cut"] > 0 and cut["documents_left_out"] > 0
    rows = ConversationSamples(tmp_path / "cut", "train", [dataset]).rows(range(cut["samples"]))
    assert ((rows["labels"] != NO_LABEL).sum(axis=1) > 0).all()
    assert single["train_samples"] == 200
    samples = ConversationSamples(tmp_path / "one", "train", [dataset])
    epochs = [[samples.documents_of(n)[0].document for n in range(80 * e, 80 * e + 80)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(80)) and epochs[0] != epochs[1]


def test_bad_records_are_counted_and_plain_documents_are_no_conversations(
    tmp_path: Path, store: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [*_records(4), {"prompt": "a"}, {"prompt": "a", "response": ""}, "x"]
    words = ["--source", _write(tmp_path / "a.jsonl", records), "--tokenizer", tokenizer, "--store", store]
    more = ["--prompt", "{prompt}", "--on-error", "quarantine", "--json", "--no-track"]

    outcome = shardline(capsys, "ingest", *words, *more, "-o", tmp_path / "data")

    assert outcome.code == 0, outcome.err
    assert (outcome.data["documents"], outcome.data["rejected"]) == (4, 3)
    reasons = (tmp_path / "data" / "rejects.jsonl").read_text()
    assert "no key 'response'" in reasons and "response 1 is empty" in reasons
    plain = [*words[2:], "--source", _write(tmp_path / "b.jsonl", [{"text": "one"}, {"text": "two"}])]
    shardline(capsys, "ingest", *plain, "-o", tmp_path / "plain", "--json", "--no-track")
    refused = shardline(capsys, "index", "--dataset", tmp_path / "plain", "-s", "objective=sft", "--store", store)
    assert refused.code != 0 and "has 1 sequences; conversations have two" in refused.err


@pytest.mark.slow
def test_a_pretrained_model_is_fine_tuned_on_what_is_said(
    dataset: TokenDataset, tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "max_position_embeddings=64"]
    words = [item for text in model for item in ("-s", f"model.{text}")]
    words += ["-s", "seq_length=64", "-s", "global_batch_size=4", "-s", "split='90,10,0'", "-s", "valid_batches=1"]
    words += ["-s", "optimizer.lr=0.005", "-s", "optimizer.warmup_steps=2", "--store", store, "--json", "--no-track"]
    data = ["--dataset", dataset.path]
    base = shardline(capsys, "pretrain", *data, *words, "-s", "train_steps=3", "-o", tmp_path / "base")
    assert base.code == 0, base.err
    assert "warning: the dataset holds conversations" in base.err

    tuned = shardline(
        capsys, "pretrain", "--from", tmp_path / "base", "--sft", *data, *words, "-s", "train_steps=30", "-s",
        "layout.tensor_parallel=2", "-o", tmp_path / "tuned",
    )  # fmt: skip

    assert tuned.code == 0, tuned.err
    losses = [line["loss_nats"] for line in read(tmp_path / "tuned" / METRICS)]
    assert losses[-1] < losses[0] - 1.0
    assert tuned.data["valid_loss_nats"] < losses[0] - 1.0
