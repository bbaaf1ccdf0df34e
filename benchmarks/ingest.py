"""CPU time of the ingest stage against a plain loop over the same tokenizer.

    python benchmarks/ingest.py [--megabytes 24] [--repeats 3]

The loop calls `tokenizer.encode_batch([text])` for each document and appends the ids to a file. The
stage does all it does for a user: reading, checks, digests, provenance, publication. Both run in
fresh processes with one thread, one after the other in turn; time is that of the process tree,
user and system. The `.bin` files must be equal.
"""

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "ingest.jsonl"

LOOP = """
import io, json, sys
import numpy as np, zstandard
from tokenizers import Tokenizer
source, tokenizer, target = sys.argv[1:]
encoder = Tokenizer.from_file(tokenizer)
end = encoder.token_to_id("<|endoftext|>")
with open(source, "rb") as raw, open(target, "wb") as out:
    lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True), "utf-8")
    for line in lines:
        ids = encoder.encode_batch([json.loads(line)["text"]])[0].ids
        ids.append(end)
        out.write(np.array(ids, dtype=np.uint16).tobytes())
"""

STAGE = """
import sys
from pathlib import Path
from contracts.store import ArtifactStore
from preprocessing.config import IngestConfig
from preprocessing.stages import INGEST
source, tokenizer, output = sys.argv[1:]
config = IngestConfig(sources=[source], tokenizer=tokenizer, workers=1)
INGEST.run(config, store=ArtifactStore(Path(output).parent / "store", output=Path(output)))
"""


def prepare(folder: Path, megabytes: float) -> tuple[Path, Path, int]:
    """Gather text of this machine and train a tokenizer; return corpus file, tokenizer.json, text bytes."""
    from contracts.store import ArtifactStore
    from preprocessing.config import CorpusConfig, TokenizerConfig
    from preprocessing.stages import CORPUS, TOKENIZER

    store = ArtifactStore(folder / "store")
    corpus = CORPUS.run(
        CorpusConfig(max_bytes=int(megabytes * 1e6), heldout_fraction=0, documents_per_file=10**9), store=store
    )
    tokenizer = TOKENIZER.run(
        TokenizerConfig(vocab_size=8192, max_bytes=8 * 10**6), inputs={"corpus": corpus}, store=store
    )
    return (
        corpus.path / "train" / "00000.jsonl.zst",
        tokenizer.path / "tokenizer.json",
        corpus.summary["train_bytes"],
    )


def cpu_seconds(code: str, arguments: list[str]) -> float:
    """Run Python code in a fresh process; return the CPU time of it and its children."""
    one_thread = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).resolve().parent.parent)
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env={**os.environ, **one_thread}, cwd=root)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"a run ended with code {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def measure(folder: Path, megabytes: float, repeats: int) -> dict[str, Any]:
    """Run loop and stage in turn; return their times and ratio."""
    source, tokenizer, text_bytes = prepare(folder, megabytes)
    loop, stage = [], []
    for number in range(repeats):
        target, output = folder / f"loop{number}.bin", folder / f"stage{number}"
        loop.append(cpu_seconds(LOOP, [str(source), str(tokenizer), str(target)]))
        stage.append(cpu_seconds(STAGE, [str(source), str(tokenizer), str(output)]))
        digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (target, output / "data-00000.bin")}
        if len(digests) != 1:
            raise SystemExit("the stage and the loop wrote different tokens")
    return {
        "benchmark": "ingest",
        "text_megabytes": round(text_bytes / 1e6, 2),
        "loop_cpu_s": [round(value, 3) for value in loop],
        "stage_cpu_s": [round(value, 3) for value in stage],
        "ratio": round(statistics.median(loop) / statistics.median(stage), 2),
        "stage_megabytes_per_cpu_s": round(text_bytes / 1e6 / statistics.median(stage), 2),
    }


def provenance() -> dict[str, Any]:
    """Commit, versions, machine."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    ).stdout.strip()
    versions = {name: metadata.version(name) for name in ("tokenizers", "numpy", "orjson", "zstandard")}
    return {
        "commit": commit or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=24.0, help="text to ingest")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.megabytes, options.repeats)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**result, **provenance()}) + "\n")
    print(
        f"ingest: {result['text_megabytes']} MB, loop {statistics.median(result['loop_cpu_s']):.2f} CPU-s, "
        f"stage {statistics.median(result['stage_cpu_s']):.2f} CPU-s, ratio {result['ratio']:.2f}x less CPU (goal 1.5)"
    )


if __name__ == "__main__":
    main()
