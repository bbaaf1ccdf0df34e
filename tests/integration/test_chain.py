"""A whole tiny chain through the command line, from text to report."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import shardline

pytestmark = pytest.mark.slow

CHAIN = """
name: tiny
store: store
corpus: {max_bytes: 300_000, max_document_bytes: 8192, heldout_fraction: 0.1}
tokenizer: {vocab_size: 400}
ingest: {}
pretrain:
  model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, max_position_embeddings: 32}
  layout: {tensor_parallel: 2}
  seq_length: 32
  micro_batch_size: 4
  global_batch_size: 8
  train_steps: 60
  checkpoint_interval: 30
  optimizer: {lr: 1e-2, min_lr: 1e-3, warmup_steps: 5}
reshape:
  - {name: pp2, to: native, pipeline_parallel: 2}
  - {name: hf, to: huggingface}
evaluate: {max_documents: 8}
report: {}
"""


def test_the_chain_runs_is_skipped_and_can_be_traced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("chain.yaml").write_text(CHAIN)

    first = shardline(capsys, "run", "chain.yaml", "--json")
    assert first.code == 0, first.err
    artifacts: dict[str, Any] = first.data["artifacts"]
    assert len(first.data["built"]) == len(artifacts) == 12

    metrics = [artifacts[f"evaluate.{name}"]["summary"]["metrics"] for name in ("pretrain", "pp2", "hf")]
    for other in metrics[1:]:
        assert other["nats"] == pytest.approx(metrics[0]["nats"], rel=1e-6)
        assert other["subsets"].keys() == metrics[0]["subsets"].keys()

    report = artifacts["report"]["summary"]
    assert report["final_loss_nats"] < report["first_loss_nats"]
    assert 0 < report["unigram_entropy_nats"] < math.log(400)
    page = (Path(artifacts["report"]["path"]) / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert not re.search(r'(src|href)="http', page)

    second = shardline(capsys, "run", "chain.yaml", "--json")
    assert second.data["built"] == []
    assert shardline(capsys, "plan", "chain.yaml").code == 0

    run = artifacts["pretrain"]["path"]
    traced = shardline(capsys, "trace", run, "--step", "60", "--text", "--json", "--store", "store").data["documents"]
    assert {row["sample"] for row in traced} == set(range(59 * 8, 60 * 8))
    assert all(row["text"] and row["file"] for row in traced)
    assert shardline(capsys, "trace", run, "--step", "61", "--store", "store").code == 2

    pp2, hf = artifacts["reshape.pp2"]["path"], artifacts["reshape.hf"]["path"]
    weights = shardline(capsys, "diff", run, pp2, "--store", "store", "--json").data["weights"]
    assert weights["different_tensors"] == 0 and weights["equal_tensors"] > 0
    for path in (run, pp2, hf, artifacts["ingest"]["path"]):
        assert shardline(capsys, "verify", path, "--store", "store").code == 0
        assert shardline(capsys, "inspect", path, "--store", "store").code == 0
    tree = shardline(capsys, "lineage", artifacts["evaluate.hf"]["path"], "--store", "store").out
    for kind in ("model/", "checkpoint/", "dataset/", "tokenizer/", "corpus/"):
        assert kind in tree

    Path("store/mlflow.db").unlink()
    # A process of its own: this one still holds the removed database open.
    command = [sys.executable, "-m", "flows.cli", "lineage", "sync", "--store", "store", "--json"]
    run_again = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(run_again.stdout)["written"] == len(list(Path("store").glob("*/*/manifest.json")))
