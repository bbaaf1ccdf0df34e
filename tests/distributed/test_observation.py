"""What a run shows of itself: the loss of each subset, traces, times; and compiled blocks that compute the same."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from ranks import run_on_ranks
from tiny_corpus import make_dataset, write_corpus
from training_cases import SEQ_LENGTH, PatternSource, curve, new_trainer, relative_difference, tiny_config

from contracts.errors import ConfigError
from contracts.store import ArtifactStore
from preprocessing.config import IndexConfig
from preprocessing.samples.opening import open_causal_samples
from preprocessing.samples.trace import trace_samples
from preprocessing.stages import INDEX
from training.config import PretrainConfig
from training.metrics import METRICS, read
from training.rank import Job, run
from training.scoring import Scorer
from training.subset_losses import SubsetLosses

Layout = tuple[int, int, int]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = ArtifactStore(tmp_path_factory.mktemp("store"))
    write_corpus(store.root / "corpus.jsonl")
    dataset = make_dataset(store, store.root / "corpus.jsonl")
    config = IndexConfig(seq_length=SEQ_LENGTH, samples=80, valid_samples=0, test_samples=0, seed=1, split="1,0,0")
    return INDEX.run(config, inputs={"dataset0": dataset}, store=store).path


def _config(layout: Layout, **changes: Any) -> PretrainConfig:
    return tiny_config("gpt2", layout, model={"vocab_size": 300}, train_steps=4, **changes)


def _expected(config: PretrainConfig, index: Path) -> dict[str, float]:
    """Loss of each subset under the initial weights, by the tracing of samples and the scorer."""
    trainer = new_trainer(config)
    tokens = torch.from_numpy(open_causal_samples(index).tokens(range(8)))
    log_probs, _ = Scorer(trainer.stages, trainer.mesh, dtype=torch.float64).log_probs(tokens[:, :-1], tokens[:, 1:])
    subsets: dict[int, list[str]] = defaultdict(list)
    for span in trace_samples(index, range(8)):
        subsets[span.sample] += [str(span.subset)] * span.num_tokens
    found: dict[str, list[float]] = defaultdict(list)
    for row in range(8):
        for position in range(SEQ_LENGTH):
            found[f"loss_nats/{subsets[row][position + 1]}"].append(-float(log_probs[row, position]))
    return {name: float(np.mean(values)) for name, values in found.items()}


def _run(config: PretrainConfig, index: Path, root: Path) -> list[dict[str, Any]]:
    (root / "logs").mkdir(parents=True, exist_ok=True)
    job = Job(config.model_dump(mode="json"), str(root), str(index), None, None, str(root / "stop"), {})
    run(new_trainer(config), job, open_causal_samples(index), {})
    return list(read(root / METRICS)) if torch.distributed.get_rank() == 0 else []


@pytest.mark.parametrize(
    ("layout", "context"), [((1, 1, 1), 1), ((2, 1, 1), 1), ((1, 2, 1), 1), ((1, 1, 2), 1), ((1, 1, 1), 2)], ids=str
)
def test_the_loss_of_each_subset_is_that_of_its_tokens_at_every_layout(
    layout: Layout, context: int, index: Path, tmp_path: Path
) -> None:
    expected = run_on_ranks(1, _expected, _config((1, 1, 1)), index)[0]
    more = {"context_parallel": context}
    config = _config(layout, subset_losses=True, profile_steps=(2, 3), layout_more=more)

    lines = run_on_ranks(config.layout.world_size, _run, config, index, tmp_path)[0]

    assert expected.keys() == {"loss_nats/even", "loss_nats/odd"}
    assert {name: lines[0][name] for name in expected} == pytest.approx(expected, rel=1e-10)
    assert lines[0]["loss_nats"] != lines[-1]["loss_nats"]
    assert all(expected.keys() <= line.keys() for line in lines)
    traces = sorted((tmp_path / "logs").glob("trace-rank-*.json.gz"))
    assert len(traces) == layout[1]
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    assert sum("mm" in event.get("name", "") for event in events) > 10


def _refused(config: PretrainConfig) -> str:
    try:
        SubsetLosses(new_trainer(config), PatternSource())
    except ConfigError as error:
        return str(error)
    return "no error"


def test_samples_without_documents_have_no_subsets() -> None:
    assert "the order of their documents" in run_on_ranks(1, _refused, tiny_config("gpt2"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1)], ids=str)
def test_compiled_blocks_compute_the_same(layout: Layout) -> None:
    changes: dict[str, Any] = {"train_steps": 4}

    plain = run_on_ranks(1, _curve, tiny_config("llama", **changes))[0]
    compiled = run_on_ranks(
        layout[0] * layout[1], _curve, tiny_config("llama", layout, compile=True, **changes), timeout_s=300
    )[0]

    assert relative_difference(compiled, plain) < 1e-12


def _curve(config: PretrainConfig) -> list[tuple[float, float]]:
    return curve(new_trainer(config), config.train_steps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": True, "recompute": "selective"}, "does not go with recompute: selective"),
        ({"profile_steps": (3, 2)}, r"profile_steps \[3, 2\] ends before it begins"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny_config("gpt2", **settings)
