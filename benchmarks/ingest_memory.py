"""Peak memory of each process of the ingest stage, at a small and at a ten times larger input.

    python benchmarks/ingest_memory.py [--megabytes 200] [--workers 2]

Text is gathered from this machine; the large input is the small one ten times, each document with
a number of its own. Both forms are measured: plain lines, whose parts the workers do whole, and one
zstd stream, whose blocks are fed to them. Peaks are VmHWM of each process: the parent first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import zstandard
from engines import ROOT, machine_texts, provenance

RESULTS = Path(__file__).parent / "results" / "ingest_memory.jsonl"
TIMES = 10
SAMPLE_S = 0.2

STAGE = """
import sys
from pathlib import Path
from contracts.store import ArtifactStore
from preprocessing.config import IngestConfig
from preprocessing.stages import INGEST
source, tokenizer, output, workers = sys.argv[1:]
config = IngestConfig(sources=[source], tokenizer=tokenizer, workers=int(workers), part_bytes=2**26)
INGEST.run(config, store=ArtifactStore(Path(output).parent / "store", output=Path(output)))
"""


def write_corpora(folder: Path, megabytes: float) -> dict[str, Path]:
    """Write the small and the large corpus, as plain lines and as one zstd stream each."""
    texts = list(machine_texts(int(megabytes * 1e6)))
    found = {}
    for name, times in (("small", 1), ("large", TIMES)):
        for suffix in (".jsonl", ".jsonl.zst"):
            path = folder / f"{name}{suffix}"
            with path.open("wb") if suffix == ".jsonl" else zstandard.open(path, "wb") as file:
                for number in range(times):
                    for text in texts:
                        salt = f" #{number}" if number else ""
                        file.write(json.dumps({"text": text + salt}, ensure_ascii=False).encode() + b"\n")
            found[path.name] = path
    return found


def train_tokenizer(folder: Path, source: Path) -> Path:
    from contracts.store import ArtifactStore
    from preprocessing.config import TokenizerConfig
    from preprocessing.stages import TOKENIZER

    config = TokenizerConfig(sources=(str(source),), vocab_size=32_768, max_bytes=24_000_000)
    return TOKENIZER.run(config, store=ArtifactStore(folder / "store")).path


def peaks(command: list[str]) -> list[int]:
    """Run a command; return the peak resident memory of each process of its tree in MB, its own first."""
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[int, int] = {}

    def sample() -> None:
        while process.poll() is None:
            waiting = [process.pid]
            while waiting:
                pid = waiting.pop()
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                    found[pid] = int(status.partition("VmHWM:")[2].split()[0]) // 1024
                    for children in Path(f"/proc/{pid}/task").glob("*/children"):
                        waiting += map(int, children.read_text().split())
                except (OSError, IndexError):
                    continue
            time.sleep(SAMPLE_S)

    thread = threading.Thread(target=sample)
    thread.start()
    if process.wait():
        raise SystemExit(f"a run ended with code {process.returncode}")
    thread.join()
    return [size for size in found.values() if size > 64]  # forks that were not yet a program are left out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200.0, help="text of the small input")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    options = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "ingest_memory", "megabytes": options.megabytes, "peaks_mb": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpora = write_corpora(folder, options.megabytes)
        tokenizer = train_tokenizer(folder, corpora["small.jsonl"])
        for corpus, path in corpora.items():
            words = [path, tokenizer, folder / f"{corpus}-out", options.workers]
            found = peaks([sys.executable, "-c", STAGE, *map(str, words)])
            result["peaks_mb"][corpus] = found
            print(f"ingest_memory: {corpus:15} peaks {found} MB (goal 500 for each process)")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**result, **provenance()}) + "\n")


if __name__ == "__main__":
    main()
