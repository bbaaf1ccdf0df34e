"""Evaluation of native checkpoints through real ranks, checked against numbers worked out by hand."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import tiny_model, write_model

from contracts.digests import sha256_of
from contracts.errors import ConfigError, InputError
from contracts.progress import SilentProgress
from contracts.store import ArtifactStore
from evaluation.config import EvaluateConfig
from evaluation.evaluate import open_data
from evaluation.requests import encode
from evaluation.score import score_file
from evaluation.stage import EVALUATE
from preprocessing.config import IngestConfig
from preprocessing.dataset.indexed_dataset import PairWriter
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.stages import INGEST
from preprocessing.tokenization.loading import load_tokenizer

CASES = Path(__file__).parents[1] / "cases"
BYTES = CASES / "_tokenizers" / "byte257"


def evaluated(tmp_path: Path, documents: Path, checkpoint: Path, **settings: Any) -> dict[str, Any]:
    store = ArtifactStore(tmp_path / "store")
    ingest = IngestConfig(sources=(str(documents),), tokenizer=str(BYTES), **settings)
    dataset = INGEST.run(ingest, store=store)
    artifact = EVALUATE.run(EvaluateConfig(checkpoint=str(checkpoint)), inputs={"dataset": dataset}, store=store)
    return dict(artifact.summary["metrics"])


def test_evl_04_a_uniform_model_gives_the_numbers_worked_out_by_hand(tmp_path: Path) -> None:
    expected = json.loads((CASES / "EVL-04" / "expected.json").read_text())
    checkpoint = write_model(tmp_path / "model", tiny_model(), is_uniform=True)

    metrics = evaluated(tmp_path, CASES / "EVL-04" / "docs.jsonl", checkpoint, append_eod=False)

    assert (metrics["tokens"], metrics["bytes"]) == (expected["tokens"], expected["bytes"])
    assert -metrics["nats"] == pytest.approx(expected["loglikelihood"], rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(expected["token_perplexity"], rel=1e-5)
    assert metrics["byte_perplexity"] == pytest.approx(expected["byte_perplexity"], rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-6)


def test_the_end_of_document_token_changes_no_number(tmp_path: Path) -> None:
    checkpoint = write_model(tmp_path / "model", tiny_model())
    documents = CASES / "EVL-04" / "docs.jsonl"

    without = evaluated(tmp_path / "a", documents, checkpoint, append_eod=False)
    with_eod = evaluated(tmp_path / "b", documents, checkpoint, append_eod=True)

    assert with_eod["nats"] == without["nats"]
    assert with_eod["tokens"] == without["tokens"]


def test_evl_17_an_empty_and_a_one_token_document(tmp_path: Path) -> None:
    checkpoint = write_model(tmp_path / "model", tiny_model(), is_uniform=True)

    metrics = evaluated(tmp_path, CASES / "EVL-17" / "docs.jsonl", checkpoint, keep_empty=True)

    assert (metrics["tokens"], metrics["documents"], metrics["empty_documents"]) == (3, 2, 1)
    assert metrics["nats"] == pytest.approx(3 * math.log(257), rel=1e-6)
    assert metrics["bits_per_byte"] == pytest.approx(8.005625, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_layout_measures_the_same(tmp_path: Path, layout: dict[str, int], family: str) -> None:
    model = tiny_model(family=family)
    documents = CASES / "EVL-04" / "docs.jsonl"

    one = evaluated(tmp_path / "one", documents, write_model(tmp_path / "m1", model))
    other = evaluated(tmp_path / "other", documents, write_model(tmp_path / "m2", model, layout=layout))

    assert other["nats"] == pytest.approx(one["nats"], rel=1e-6)
    assert other["token_accuracy"] == one["token_accuracy"]


def test_evl_08_a_continuation_swallowed_by_a_merge_is_encoded_apart() -> None:
    tokenizer = load_tokenizer(CASES / "_tokenizers" / "tinymerge")

    for pair in json.loads((CASES / "EVL-08" / "expected.json").read_text()):
        request = encode(tokenizer, pair["context"], pair["continuation"])
        assert list(request.tokens[request.first_target :]) == pair["scored"]


def test_scores_are_those_of_the_model_itself(tmp_path: Path) -> None:
    checkpoint = write_model(tmp_path / "model", tiny_model())
    (checkpoint.parent / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint.parent / "tokenizer" / name).write_bytes((BYTES / name).read_bytes())
    pairs = [{"context": "ab", "continuation": "cd"}, {"context": "", "continuation": "x"}]
    requests = tmp_path / "pairs.jsonl"
    requests.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    lines = score_file(checkpoint.parent, requests, step=None, batch_tokens=64, progress=SilentProgress())

    results = [json.loads(line) for line in lines]
    assert [result["num_tokens"] for result in results] == [2, 1]
    assert all(-20 < result["log_probability"] < 0 for result in results)
    assert results[0]["log_probability"] == pytest.approx(reference(checkpoint, b"ab", b"cd"), abs=1e-4)


def reference(checkpoint: Path, context: bytes, continuation: bytes) -> float:
    """Score with transformers' own GPT-2 on the same weights, through an export."""
    transformers = pytest.importorskip("transformers")
    from conversion.config import ReshapeConfig
    from conversion.stage import EXPORT

    store = ArtifactStore(checkpoint.parent.parent / "export-store")
    exported = EXPORT.run(ReshapeConfig(checkpoint=str(checkpoint), to="huggingface"), store=store)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported.path)
    ids = torch.tensor([list(context + continuation)])
    with torch.no_grad():
        log_probs = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
    start = len(context)
    return float(sum(log_probs[start - 1 + n, ids[0, start + n]] for n in range(len(continuation))))


def test_a_bad_request_line_is_named(tmp_path: Path) -> None:
    from evaluation.requests import read_requests

    requests = tmp_path / "pairs.jsonl"
    requests.write_text('{"context": "a", "continuation": "b"}\n{"context": "a"}\n')

    with pytest.raises(InputError, match="line 2: context and continuation must both be texts"):
        read_requests(requests, load_tokenizer(BYTES))


def test_data_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    checkpoint = write_model(tmp_path / "model", tiny_model())
    (checkpoint.parent / "tokenizer").mkdir()
    for path in (CASES / "_tokenizers" / "tinymerge").iterdir():
        (checkpoint.parent / "tokenizer" / path.name).write_bytes(path.read_bytes())

    with pytest.raises(ConfigError, match="another tokenizer than the model's"):
        evaluated(tmp_path, CASES / "EVL-04" / "docs.jsonl", checkpoint.parent)


def _prefix_of(dataset: Path, target: Path) -> str:
    for suffix in (".bin", ".idx"):
        (source,) = dataset.glob(f"*{suffix}")
        target.with_suffix(suffix).write_bytes(source.read_bytes())
    return str(target)


def test_a_pair_is_known_by_its_bytes_and_not_by_its_place(tmp_path: Path) -> None:
    checkpoint = write_model(tmp_path / "model", tiny_model())
    shutil.copytree(BYTES, checkpoint.parent / "tokenizer")
    store = ArtifactStore(tmp_path / "store")
    dataset = INGEST.run(
        IngestConfig(sources=(str(CASES / "EVL-04" / "docs.jsonl"),), tokenizer=str(BYTES)), store=store
    )
    prefix = _prefix_of(dataset.path, tmp_path / "pair")

    settings = EvaluateConfig(checkpoint=str(checkpoint), data=prefix, max_documents=1, data_parallel=2)
    artifact = EVALUATE.run(settings, store=store)

    how = json.loads((artifact.path / "results.json").read_text())["how"]
    assert how["data"] == {suffix: sha256_of(Path(prefix + suffix)) for suffix in (".bin", ".idx")}
    assert str(tmp_path) not in json.dumps(how)
    assert "data_parallel" not in how["layout"] and how["layout"]["tensor_parallel"] == 1
    assert artifact.summary["metrics"]["documents"] == 1


def test_only_the_documents_that_are_measured_decide_whether_they_end_with_a_token(tmp_path: Path) -> None:
    checkpoint = write_model(tmp_path / "model", tiny_model())
    shutil.copytree(BYTES, checkpoint.parent / "tokenizer")
    eod = load_tokenizer(BYTES).eod_id
    assert eod is not None
    writer = PairWriter(tmp_path / "pair", np.dtype("<u2"))
    writer.append(np.array([1, 2, eod, 3, eod, 4]), np.array([3, 2, 1]))
    writer.finish()

    assert open_data(tmp_path / "pair", checkpoint, 2).eod_id == eod
    assert open_data(tmp_path / "pair", checkpoint).eod_id is None


def test_last_tokens_are_those_of_the_documents_read_whole() -> None:
    for path in sorted((CASES / "megatron_index" / "datasets").glob("*.idx")):
        dataset = TokenDataset(path)
        count = min(dataset.num_documents, 50)
        whole = [next(iter(dataset.document(n)[-1:].tolist()), -1) for n in range(count)]
        assert dataset.last_tokens(count).tolist() == whole
