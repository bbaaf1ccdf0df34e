"""Reshaping a checkpoint against `cp` of the same bytes.

    python benchmarks/conversion.py [--layers 12] [--hidden 768] [--optimizer] [--repeats 3]

A synthetic native checkpoint of about 100 million float32 parameters at layout (1, 1, 1) goes to
(2, 2, 1), tensor by pipeline by data parallel: with verification (the source's files by digest, the
result read back and compared bit by bit), and without. Beside it, in turn, the source's files are
copied and synced to the disk. Every run is a fresh process; CPU time is that of its whole tree,
once with the start of the interpreter and the import of torch and once without them.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "conversion.jsonl"

COPY = """
import os, shutil, sys, time
from pathlib import Path
source, target = map(Path, sys.argv[1:3])
started = time.perf_counter(), time.process_time()
target.mkdir()
for file in source.iterdir():
    shutil.copyfile(file, target / file.name)
    descriptor = os.open(target / file.name, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
print(time.perf_counter() - started[0], time.process_time() - started[1], 0)
"""

RESHAPE = """
import sys, threading, time
from pathlib import Path
import torch, torch.distributed.checkpoint, numpy, conversion.reshape
from contracts.store import ArtifactStore
from conversion.config import ReshapeConfig
from conversion.stage import stage_for

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def watch():
    while not done.wait(0.005):
        peak[0] = max(peak[0], anonymous_bytes())

source, target, verify = sys.argv[1:4]
store = ArtifactStore(Path(target).parent / (Path(target).name + "-store"), output=Path(target))
settings = ReshapeConfig(
    checkpoint=source, tensor_parallel=2, pipeline_parallel=2, verify=verify == "verify"
)
before = anonymous_bytes()
peak, done = [before], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
started = time.perf_counter(), time.process_time()
stage_for(settings).run(settings, store=store)
took = time.perf_counter() - started[0], time.process_time() - started[1]
done.set()
thread.join()
print(*took, peak[0] - before)
"""


def prepare(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write the synthetic checkpoint; return its sizes."""
    import torch

    from training.checkpoint import write_checkpoint
    from training.config import LayoutConfig, ModelConfig
    from training.parameters import stored_parameters
    from training.step_folders import CheckpointInfo

    model = ModelConfig.model_validate(
        {
            "family": "gpt2",
            "num_layers": options.layers,
            "hidden_size": options.hidden,
            "num_attention_heads": options.hidden // 64,
            "vocab_size": options.vocab,
        }
    )
    torch.manual_seed(1)
    shapes = {name: shape for name, (shape, _) in stored_parameters(model).items()}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    if options.optimizer:
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors |= {f"optim.{name}.{moment}": torch.rand(shape) for name, shape in shapes.items()}
    info = CheckpointInfo(
        step=1,
        consumed_samples=1,
        seq_length=1024,
        model=model.model_dump(mode="json"),
        layout=LayoutConfig().model_dump(mode="json"),
        has_optimizer=options.optimizer,
        parameters=shapes,
    )
    write_checkpoint(folder / "step-00000001", tensors, info)
    largest = max(tensor.numel() * 4 for tensor in tensors.values())
    return {
        "parameters": sum(tensors[name].numel() for name in shapes),
        "bytes": sum(tensor.numel() * 4 for tensor in tensors.values()),
        "largest_slice_bytes": largest // 2,
    }


def run(code: str, *arguments: str) -> dict[str, float]:
    """Run Python code in a fresh process; it prints wall seconds, CPU seconds and peak bytes of its work."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    text = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"a run ended with code {process.returncode}")
    wall, cpu, peak = (float(item) for item in text.split())
    return {"wall_s": wall, "cpu_s": cpu, "cpu_with_start_s": usage.ru_utime + usage.ru_stime, "peak_bytes": peak}


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run copy and reshapes in turn; return medians and ratios."""
    sizes = prepare(folder / "source", options)
    source = folder / "source" / "step-00000001"
    found: dict[str, list[dict[str, float]]] = {"cp": [], "reshape": [], "reshape_unverified": []}
    for number in range(options.repeats):
        target = folder / f"target{number}"
        found["cp"].append(run(COPY, str(source), str(target)))
        shutil.rmtree(target)
        for name, verify in (("reshape", "verify"), ("reshape_unverified", "no")):
            found[name].append(run(RESHAPE, str(source), str(target), verify))
            shutil.rmtree(target)
            shutil.rmtree(folder / f"target{number}-store", ignore_errors=True)
    medians = {
        f"{name}_{key}": round(statistics.median(item[key] for item in items), 3 if key != "peak_bytes" else None)
        for name, items in found.items()
        for key in items[0]
    }
    walls = {name: [item["wall_s"] for item in items] for name, items in found.items()}
    return {
        "benchmark": "conversion",
        **sizes,
        "has_optimizer": options.optimizer,
        **medians,
        "wall_ratio": round(statistics.median(walls["reshape"]) / statistics.median(walls["cp"]), 2),
        "wall_ratio_unverified": round(
            statistics.median(walls["reshape_unverified"]) / statistics.median(walls["cp"]), 2
        ),
        "load_average": round(os.getloadavg()[0], 1),
    }


def provenance() -> dict[str, Any]:
    """Commit, versions, machine."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.strip()
    return {
        "commit": commit or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {"torch": metadata.version("torch")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=24_000)
    parser.add_argument("--optimizer", action="store_true", help="with both moments: three times the bytes")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        result = measure(Path(folder), options)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**result, **provenance()}) + "\n")
    print(
        f"conversion: {result['parameters'] / 1e6:.0f}M float32 parameters, {result['bytes'] / 1e6:.0f} MB, "
        "(1,1,1) -> (2,2,1)\n"
        f"  cp + fsync          {result['cp_wall_s']:.2f} s wall, {result['cp_cpu_s']:.2f} CPU-s\n"
        f"  reshape, verified   {result['reshape_wall_s']:.2f} s wall, {result['reshape_cpu_s']:.2f} CPU-s "
        f"({result['reshape_cpu_with_start_s']:.2f} with start), ratio {result['wall_ratio']:.2f}x cp (goal 2.5), "
        f"peak {result['reshape_peak_bytes'] / 2**20:.0f} MiB above the interpreter "
        f"(goal {64 + 2 * result['largest_slice_bytes'] / 2**20:.0f})\n"
        f"  reshape, unverified {result['reshape_unverified_wall_s']:.2f} s wall, "
        f"{result['reshape_unverified_cpu_s']:.2f} CPU-s, ratio {result['wall_ratio_unverified']:.2f}x cp"
    )


if __name__ == "__main__":
    main()
