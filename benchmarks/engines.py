"""MB of text per CPU-second of each engine: alone in memory, and in the whole ingest stage.

    python benchmarks/engines.py [--megabytes 200] [--repeats 3] [--engines gigatoken pieces ...]

Text is gathered from this machine (sources, documentation, installed packages, each document once), a
byte-level tokenizer of 32,768 tokens is trained on a sample of it, and the text is written as one
.jsonl.zst. In memory, an engine encodes blocks of 2 MiB of texts that are parsed already. The stage does
all it does for a user, with one worker. Runs are fresh processes with one thread, engine after engine
in turn; time is user and system of the process tree, in memory that of encoding alone. All ids must
be equal. The slow engines run once.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import zstandard

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "engines.jsonl"
FOLDERS = ("/usr/share", "/usr/include", "/usr/lib", "/usr/local", "/opt", sys.prefix, sys.base_prefix)
LARGEST_BYTES = 600_000
FAST = ("gigatoken", "fastokens")
ENGINES = (*FAST, "tiktoken", "pieces", "tokenizers")

MEMORY = """
import hashlib, sys, time
from pathlib import Path
import orjson, zstandard
import numpy as np
from preprocessing.tokenization.engines import make_engine
from preprocessing.tokenization.loading import load_tokenizer
name, source, tokenizer = sys.argv[1:]
lines = zstandard.ZstdDecompressor().stream_reader(open(source, "rb")).read().splitlines()
blocks, size = [[]], 0
for line in lines:
    blocks[-1].append(orjson.loads(line)["text"])
    size += len(line)
    if size > 2**21:
        blocks.append([])
        size = 0
del lines
engine = make_engine(name, load_tokenizer(tokenizer))
digest, spent = hashlib.sha256(), 0.0
for block in filter(None, blocks):
    started = time.process_time()
    ids, lengths = engine.encode(block)
    spent += time.process_time() - started
    digest.update(np.ascontiguousarray(ids, dtype="<u4").data)
print(spent, digest.hexdigest())
"""

STAGE = """
import sys
from pathlib import Path
from contracts.store import ArtifactStore
from preprocessing.config import IngestConfig
from preprocessing.stages import INGEST
name, source, tokenizer, output = sys.argv[1:]
config = IngestConfig(sources=[source], tokenizer=tokenizer, engine=name, workers=1)
artifact = INGEST.run(config, store=ArtifactStore(Path(output).parent / "store", output=Path(output)))
if list(artifact.summary["engines"]["used"]) != [name]:
    raise SystemExit(f"{name} was not used: {artifact.summary['engines']}")
"""


def machine_texts(wanted_bytes: int) -> Iterator[str]:
    """Yield distinct texts found on this machine, in an order that is the same each time."""
    paths = sorted({path for folder in FOLDERS for path in _files(Path(folder))})
    random.Random(1).shuffle(paths)
    seen: set[bytes] = set()
    found = 0
    for path in paths:
        try:
            data = path.read_bytes()
            text = data.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha1(data).digest()
        if digest in seen or "\0" in text:
            continue
        seen.add(digest)
        found += len(data)
        yield text
        if found >= wanted_bytes:
            return
    raise SystemExit(f"this machine has only {found / 1e6:.0f} MB of text; give --megabytes")


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if not path.is_symlink() and path.is_file() and 64 < path.stat().st_size < LARGEST_BYTES:
                yield path


def prepare(folder: Path, megabytes: float) -> tuple[Path, Path, int]:
    """Write the corpus and train a tokenizer; return both and the bytes of text."""
    from contracts.store import ArtifactStore
    from preprocessing.config import TokenizerConfig
    from preprocessing.stages import TOKENIZER

    source = folder / "corpus.jsonl.zst"
    text_bytes = 0
    with zstandard.open(source, "wb") as file:
        for text in machine_texts(int(megabytes * 1e6)):
            text_bytes += len(text.encode())
            file.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
    config = TokenizerConfig(sources=(str(source),), vocab_size=32_768, max_bytes=24_000_000, sample="spread")
    tokenizer = TOKENIZER.run(config, store=ArtifactStore(folder / "store"))
    return source, tokenizer.path, text_bytes


def run(code: str, *arguments: object) -> tuple[float, list[str]]:
    """Run Python code in a fresh process; return the CPU seconds of its tree and the words that it prints."""
    one_thread = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, env={**os.environ, **one_thread}, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    words = (process.stdout.read() if process.stdout else "").split()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"a run ended with code {process.returncode}")
    return usage.ru_utime + usage.ru_stime, words


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the engines in turn; return MB per CPU-second of each, in memory and in the stage."""
    source, tokenizer, text_bytes = prepare(folder, options.megabytes)
    spent: dict[str, dict[str, list[float]]] = {name: {"memory": [], "stage": []} for name in options.engines}
    digests: dict[str, set[str]] = {"ids": set(), "bin": set()}
    for number in range(options.repeats):
        for name in options.engines:
            if number and name not in FAST:
                continue
            _, (seconds, digest) = run(MEMORY, name, source, tokenizer)
            spent[name]["memory"].append(float(seconds))
            digests["ids"].add(digest)
            output = folder / f"{name}{number}"
            spent[name]["stage"].append(run(STAGE, name, source, tokenizer, output)[0])
            digests["bin"].add(hashlib.sha256((output / "data-00000.bin").read_bytes()).hexdigest())
    if any(len(found) != 1 for found in digests.values()):
        raise SystemExit("two engines gave different tokens")
    rates = {
        name: {f"{kind}_mb_per_cpu_s": text_bytes / 1e6 / statistics.median(times) for kind, times in found.items()}
        for name, found in spent.items()
    }
    for found in rates.values():
        found["stage_over_memory"] = found["stage_mb_per_cpu_s"] / found["memory_mb_per_cpu_s"]
    return {"text_megabytes": round(text_bytes / 1e6, 1), "engines": rates}


def provenance() -> dict[str, Any]:
    """Commit, versions, machine."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()
    names = ("tokenizers", "gigatoken", "fastokens", "tiktoken", "numpy", "orjson", "zstandard")
    return {
        "commit": commit or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {name: metadata.version(name) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200.0, help="text to gather")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the fast engines, in turn")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES, help="engines to run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"benchmark": "engines", **result, **provenance()}) + "\n")
    for name, found in result["engines"].items():
        memory, stage, ratio = found.values()
        print(
            f"engines: {name:10} {memory:6.1f} MB/CPU-s in memory, {stage:5.1f} in the stage from .jsonl.zst, "
            f"ratio {ratio:.2f}" + (" (goal 20 MB/CPU-s)" if name in FAST else " (goal 0.8)")
        )


if __name__ == "__main__":
    main()
