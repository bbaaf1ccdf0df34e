"""CPU time and memory of building sample indices, and of reading a sample.

    python benchmarks/index.py [--documents 10000000] [--repeats 3]

The peer is a straightforward compiled loop for the starts of samples (numba, one document after
the other) with numpy's `RandomState.shuffle`, as Megatron-LM builds its indices: the arrays must be
equal. CPU time is user and system of the work alone, after compilation; memory is the growth of the
peak of the process over what it held before (the lengths). Reading is that of 2048-token samples in
batches of 32 from warm files.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from ingest import provenance

RESULTS = Path(__file__).parent / "results" / "index.jsonl"
SEQ_LENGTH = 2048


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM"))


def lengths_of(documents: int) -> np.ndarray[Any, Any]:
    """Return lognormal lengths, as facts about real corpora suggest, with empty documents."""
    random = np.random.default_rng(0)
    lengths = np.maximum(0, random.lognormal(6.5, 1.0, documents)).astype(np.int32)
    lengths[::97] = 0
    return lengths


def build_plainly(lengths: Any, folder: Path) -> None:
    """Build the three indices with one compiled loop and numpy's shuffle."""
    from numba import njit

    @njit  # type: ignore[untyped-decorator]
    def starts(lengths: Any, order: Any, seq_length: int, result: Any) -> None:
        position, offset = 0, 0
        for k in range(1, len(result)):
            left = seq_length + 1
            while left:
                here = lengths[order[position]] - offset
                left -= here
                if left <= 0:
                    offset += left + here - 1
                    left = 0
                else:
                    position += 1
                    offset = 0
            result[k, 0] = position
            result[k, 1] = offset

    starts(lengths[:10], np.arange(10, dtype=np.int32), 1, np.zeros((2, 2), np.int32))
    _reset_peak()
    before, held = cpu_s(), peak_bytes()
    random = np.random.RandomState(1234)
    order = np.arange(len(lengths), dtype=np.int32)
    random.shuffle(order)
    num_samples = (int(lengths.sum(dtype=np.int64)) - 1) // SEQ_LENGTH
    rows = np.zeros((num_samples + 1, 2), dtype=np.int32)
    starts(lengths, order, SEQ_LENGTH, rows)
    samples = np.arange(num_samples, dtype=np.uint32)
    random.shuffle(samples)
    for name, array in (("document", order), ("sample", rows), ("shuffle", samples)):
        np.save(folder / f"x_{name}_index.npy", array)
    _tell(before, held)


def build(lengths: Any, folder: Path) -> None:
    """Build them as the index stage does."""
    from preprocessing.samples import compiled, kernels
    from preprocessing.samples.sample_index import build_sample_index, plan_units, save_sample_index

    kernels.COMPILE_ABOVE, limit = 0, kernels.COMPILE_ABOVE
    build_sample_index(lengths[:1000], range(1000), seq_length=8, num_samples=None, seed=1)  # compiles, or loads
    kernels.COMPILE_ABOVE = limit
    del compiled
    _reset_peak()
    before, held = cpu_s(), peak_bytes()
    units = range(len(lengths))
    plan = plan_units(lengths, units, SEQ_LENGTH, None)
    save_sample_index(lengths, units, plan, seed=1234, folder=folder, prefix="x")
    _tell(before, held)


def read(documents: int, folder: Path) -> None:
    """Read 2048-token samples in batches from warm files."""
    from preprocessing.config import IndexConfig
    from preprocessing.dataset.indexed_dataset import PairWriter
    from preprocessing.dataset.token_dataset import TokenDataset
    from preprocessing.samples.gpt import GPTSamples
    from preprocessing.samples.index import build_index

    lengths = lengths_of(documents)
    writer = PairWriter(folder / "data", np.dtype("<u2"))
    tokens = np.random.default_rng(1).integers(0, 50000, int(lengths.sum()), dtype=np.uint16)
    writer.append(tokens, lengths.astype(np.int64))
    writer.finish()
    dataset = TokenDataset(folder / "data")
    build_index(IndexConfig(seq_length=SEQ_LENGTH), [dataset], folder / "index", note=lambda _: None)
    samples = GPTSamples(folder / "index", "train", [dataset])
    batches = [range(first, first + 32) for first in range(0, len(samples) - 32, 32)]
    for batch in batches:
        samples.__getitems__(batch)
    before = cpu_s()
    for _ in range(5):
        for batch in batches:
            samples.__getitems__(batch)
    each = (cpu_s() - before) / (5 * 32 * len(batches))
    before = cpu_s()
    for number in range(len(samples)):
        samples[number]
    print(json.dumps({"batched_us": each * 1e6, "single_us": (cpu_s() - before) / len(samples) * 1e6}))


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _tell(before: float, held: int) -> None:
    print(json.dumps({"cpu_s": cpu_s() - before, "extra_megabytes": (peak_bytes() - held) / 1e6}))


def run(what: str, documents: int, folder: Path) -> dict[str, float]:
    """Run one of the jobs in a fresh process."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--job", what, "--documents", str(documents), "--folder", str(folder)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def measure(folder: Path, documents: int, repeats: int) -> dict[str, Any]:
    """Run peer and own in turn; return times, memory and the ratio."""
    found: dict[str, list[dict[str, float]]] = {"plain": [], "own": []}
    for _ in range(repeats):
        for name, results in found.items():
            results.append(run(name, documents, folder / name))
    for name in ("document", "sample", "shuffle"):
        plain, own = (np.load(folder / where / f"x_{name}_index.npy", mmap_mode="r") for where in found)
        if plain.dtype != own.dtype or not np.array_equal(plain, own):
            raise SystemExit(f"the {name} indices differ")
    reading = [run("read", 60_000, folder / f"read{number}") for number in range(repeats)]
    times = {f"{name}_cpu_s": [round(item["cpu_s"], 3) for item in results] for name, results in found.items()}
    memory = {f"{name}_extra_megabytes": results[-1]["extra_megabytes"] for name, results in found.items()}
    return {
        "benchmark": "index",
        "documents": documents,
        **times,
        **memory,
        "ratio": round(statistics.median(times["own_cpu_s"]) / statistics.median(times["plain_cpu_s"]), 3),
        "read_batched_us": round(statistics.median(item["batched_us"] for item in reading), 2),
        "read_single_us": round(statistics.median(item["single_us"] for item in reading), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000, help="documents to index")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn")
    parser.add_argument("--job", choices=("plain", "own", "read"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job == "read":
        read(options.documents, options.folder)
        return
    if options.job:
        job = build_plainly if options.job == "plain" else build
        job(lengths_of(options.documents), options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.documents, options.repeats)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**result, **provenance()}) + "\n")
    print(
        f"index: {result['documents']} documents, {result['ratio']:.2f}x the CPU of a compiled loop with numpy's "
        f"shuffle (goal 0.6), {result['own_extra_megabytes']:.0f} MB extra (goal 43; peer "
        f"{result['plain_extra_megabytes']:.0f}); a 2048-token sample {result['read_batched_us']:.1f} us CPU in "
        f"batches (goal 15), {result['read_single_us']:.1f} us alone"
    )


if __name__ == "__main__":
    main()
