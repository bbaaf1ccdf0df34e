"""CPU time of starting: `--help`, `plan`, and a second `run` that finds everything done.

    python benchmarks/startup.py [--repeats 3]

Each command is a fresh process; time is that of its process tree, user and system, the median of
the repeats, in turn. Beside it stand a bare interpreter and the imports that a plain command avoids.
Goals: `--help` and `plan` below 1 CPU-second, a second `run` below 3.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "startup.jsonl"
GOALS_S = {"--help": 1.0, "plan": 1.0, "second run": 3.0}
CHAIN = """
name: tiny
store: store
tracking: {is_on: false}
corpus: {max_bytes: 300_000, max_document_bytes: 8192, heldout_fraction: 0.1}
tokenizer: {vocab_size: 400}
ingest: {}
pretrain:
  model: {num_layers: 2, hidden_size: 32, num_attention_heads: 2, max_position_embeddings: 32}
  layout: {tensor_parallel: 2}
  seq_length: 32
  micro_batch_size: 4
  global_batch_size: 4
  train_steps: 2
reshape:
  - {name: hf, to: huggingface}
evaluate: {max_documents: 5}
report: {}
"""


def cpu_seconds(command: list[str], folder: Path) -> float:
    """Run a command and return the CPU seconds of it and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    shardline = [sys.executable, "-m", "flows.cli"]
    commands = {
        "bare python": [sys.executable, "-c", "pass"],
        "--help": [*shardline, "--help"],
        "plan": [*shardline, "plan", "chain.yaml"],
        "second run": [*shardline, "run", "chain.yaml"],
        "import torch": [sys.executable, "-c", "import torch"],
        "import mlflow": [sys.executable, "-c", "import mlflow"],
        "import prefect": [sys.executable, "-c", "from prefect import flow"],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "chain.yaml").write_text(CHAIN, encoding="utf-8")
        subprocess.run([*shardline, "run", "chain.yaml"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        times: dict[str, list[float]] = {label: [] for label in commands}
        for _ in range(repeats):
            for label, command in commands.items():
                times[label].append(cpu_seconds(command, folder))
    medians = {label: statistics.median(values) for label, values in times.items()}
    bare = medians["bare python"]
    for label, seconds in medians.items():
        goal = f"  goal {GOALS_S[label]:.0f} s: {seconds / GOALS_S[label]:.2f} of it" if label in GOALS_S else ""
        print(f"{label:<16} {seconds:6.2f} CPU-s  {seconds / bare:6.1f} x a bare interpreter{goal}")
    record = {
        "benchmark": "startup",
        "cpu_s": {label: round(seconds, 3) for label, seconds in medians.items()},
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
