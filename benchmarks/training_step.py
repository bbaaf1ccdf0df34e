"""A training step at one rank against the plain loop, on the reference work: CPU time as ratios.

The contestants take turns in every round of one run, since only ratios within a run mean
anything on a shared machine. Prints a table and appends one line to `benchmarks/results/training.jsonl`.
`python benchmarks/training_step.py [--rounds N] [--profile] [--compile]`
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from plain_training import PlainLoop, PlainSizes

from training.config import PretrainConfig
from training.flops import step_flops_per_token
from training.mesh import build_mesh, init_single_rank
from training.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "training.jsonl"
GOAL = 1.05
CHUNK = 512


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--profile", action="store_true", help="print where our step spends its time, and end")
    parser.add_argument("--compile", action="store_true", help="also our step with compiled blocks; takes a minute")
    options = parser.parse_args()
    torch.set_num_threads(1)
    init_single_rank()
    sizes, config = PlainSizes(), reference_config()
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, (64, sizes.sequence + 1))
    ours = _our_step(config, tokens)
    if options.profile:
        _profile(ours)
        return 0
    contestants: dict[str, Callable[[], None]] = {
        "plain loop, chunked loss": _plain_step(sizes, tokens, CHUNK),
        "shardline, one rank": ours,
        "plain loop": _plain_step(sizes, tokens, None),
    }
    if options.compile:
        compiled = config.model_copy(update={"compile": True})
        contestants["shardline, compiled"] = _our_step(compiled, tokens)
    seconds, peaks = _race(contestants, options.rounds)
    dist.destroy_process_group()
    return _report(seconds, peaks, config)


def reference_config() -> PretrainConfig:
    """The reference work of every training benchmark: 14.0 M parameters, 198.1 GFLOP a step."""
    sizes = PlainSizes()
    model = {
        "family": "gpt2",
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.sequence,
    }
    batch = {"micro_batch_size": sizes.batch, "global_batch_size": sizes.batch}
    return PretrainConfig.model_validate({"model": model, "seq_length": sizes.sequence, "train_steps": 1000, **batch})


class _Rows:
    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens

    def tokens(self, sample_ids: np.ndarray) -> np.ndarray:
        return self._tokens[np.asarray(sample_ids) % len(self._tokens)]


def _our_step(config: PretrainConfig, tokens: np.ndarray) -> Callable[[], None]:
    trainer, rows = Trainer(config, build_mesh(config.layout)), _Rows(tokens)

    def step() -> None:
        trainer.train_step(rows)

    return step


def _plain_step(sizes: PlainSizes, tokens: np.ndarray, chunk: int | None) -> Callable[[], None]:
    loop = PlainLoop(sizes, chunk=chunk)
    batches = _batches(torch.from_numpy(tokens), sizes.batch)

    def step() -> None:
        rows = next(batches)
        loop.step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    return step


def _batches(tokens: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    while True:
        yield from tokens.split(size)


def _race(contestants: dict[str, Callable[[], None]], rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """CPU seconds of each step, and the matmul rate measured in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    peaks = []
    for step in contestants.values():
        step()
    for number in range(rounds):
        order = list(contestants.items())
        for name, step in order if number % 2 == 0 else order[::-1]:
            for _ in range(2):
                started = time.process_time()
                step()
                seconds[name].append(time.process_time() - started)
        peaks.append(_matmul_rate())
    return seconds, peaks


def _matmul_rate() -> float:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = min(_cpu_seconds(lambda: torch.mm(a, b)) for _ in range(10))
    return 2 * 1024**3 / best


def _cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _report(seconds: dict[str, list[float]], peaks: list[float], config: PretrainConfig) -> int:
    flops = step_flops_per_token(config.model, config.seq_length) * config.seq_length * config.global_batch_size
    peak = max(peaks)
    base = statistics.median(seconds["plain loop, chunked loss"])
    rows = {}
    print(f"{flops / 1e9:.1f} GFLOP a step; matmul {peak / 1e9:.1f} GFLOP/s; one thread; CPU seconds a step")
    for name, values in seconds.items():
        median, least = statistics.median(values), min(values)
        share = flops / least / peak
        rows[name] = {"median_s": median, "min_s": least, "ratio": median / base, "matmul_peak_share": share}
        print(f"  {name:<28} {median:6.2f} (least {least:.2f})  {median / base:5.2f}x  {share:.2f} of the matmul rate")
    ratio = rows["shardline, one rank"]["ratio"]
    print(f"goal: at most {GOAL}x the chunked plain loop: {'reached' if ratio <= GOAL else 'MISSED'} ({ratio:.3f}x)")
    record = {
        "time": time.time(),
        "commit": _commit(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "gflop_per_step": flops / 1e9,
        "matmul_gflops": peak / 1e9,
        "results": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return 0 if ratio <= GOAL else 1


def _commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _profile(step: Callable[[], None]) -> None:
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    sys.exit(main())
