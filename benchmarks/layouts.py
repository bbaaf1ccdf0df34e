"""CPU time of a training step on two ranks against one, and of recomputation and accumulation against theory.

The reference work with 8 rows a step. Ranks are processes of one thread that live through the run; the contestants
take turns, one step each, and a step costs what all its ranks use of user and system time, waiting included where
waiting spins. `python benchmarks/layouts.py [--rounds N] [--only NAME ...] [--profile]`
"""

import argparse
import json
import multiprocessing as mp
import os
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from training_step import _commit, _profile, _Rows, reference_config

from training.config import PretrainConfig
from training.flops import step_flops_per_token
from training.mesh import build_mesh
from training.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "layouts.jsonl"
GOAL = 1.15
NEAR_THEORY = 1.05
ROWS = 8
BASE = "one rank"
CASES: dict[str, dict[str, Any]] = {
    BASE: {},
    "tensor 2": {"layout": {"tensor_parallel": 2}},
    "data 2": {"layout": {"data_parallel": 2}},
    "pipeline 2": {"layout": {"pipeline_parallel": 2}},
    "recompute: full": {"recompute": "full"},
    "recompute: selective": {"recompute": "selective"},
    "four micro-batches for two": {"micro_batch_size": 2},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=CASES, help="these cases, and one rank")
    parser.add_argument("--profile", action="store_true", help="print where rank 0 spends its time, and end")
    options = parser.parse_args()
    names = [name for name in CASES if not options.only or name in options.only or name == BASE]
    jobs = {name: _Job(name, profiles=options.profile) for name in names}
    try:
        if options.profile:
            for job in jobs.values():
                job.step()
            return 0
        return _report(_race(jobs, options.rounds))
    finally:
        for job in jobs.values():
            job.end()


def config_of(name: str) -> PretrainConfig:
    case = {**reference_config().model_dump(exclude_unset=True), "global_batch_size": ROWS, **CASES[name]}
    return PretrainConfig.model_validate(case)


def theory(name: str) -> float:
    """Cost of a case as a multiple of one rank's, by its floating-point operations."""
    config = config_of(name)
    if config.recompute != "full":
        return 1.0
    step = step_flops_per_token(config.model, config.seq_length)
    output = 2 * config.model.hidden_size * config.model.padded_vocab_size
    return (step + step / 3 - output) / step


class _Job:
    """The ranks of one case, which wait for `step`."""

    def __init__(self, name: str, *, profiles: bool = False) -> None:
        size, port = config_of(name).layout.world_size, _free_port()
        context = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        self.ranks = []
        for rank in range(size):
            here, there = context.Pipe()
            work = _Work(name, rank, size, port, profiles and rank == 0, 2 if profiles else 1)  # _profile warms up
            self.ranks.append(context.Process(target=_serve, args=(work, there), daemon=True))
            self.ranks[-1].start()
            there.close()
            self.pipes.append(here)
        self._answers()

    def step(self) -> float:
        """CPU seconds of a step, of all ranks together."""
        for pipe in self.pipes:
            pipe.send(True)
        return sum(self._answers())

    def _answers(self) -> list[float]:
        return [pipe.recv() for pipe in self.pipes]

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()


@dataclass(frozen=True)
class _Work:
    name: str
    rank: int
    size: int
    port: int
    prints: bool
    steps: int


def _serve(work: _Work, pipe: Connection) -> None:
    """Warm up, then do a step at each request and answer with its CPU seconds."""
    torch.set_num_threads(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(work.port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(place | {"RANK": str(work.rank), "WORLD_SIZE": str(work.size)})
    dist.init_process_group("gloo")
    config = config_of(work.name)
    trainer = Trainer(config, build_mesh(config.layout))
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (64, config.seq_length + 1))
    rows = _Rows(tokens)
    trainer.train_step(rows)
    pipe.send(0.0)
    while pipe.recv():
        started = time.process_time()
        if work.prints:
            print(f"== {work.name}, rank 0", flush=True)
            _profile(lambda: _discard(trainer.train_step(rows)))
        else:
            for _ in range(work.steps):
                trainer.train_step(rows)
        pipe.send(time.process_time() - started)


def _discard(_result: object) -> None:
    pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _race(jobs: dict[str, _Job], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds):
        order = list(jobs.items())
        for name, job in order if number % 2 == 0 else order[::-1]:
            seconds[name].append(job.step())
    return seconds


def _report(seconds: dict[str, list[float]]) -> int:
    base, rows, missed = min(seconds[BASE]), {}, []
    print("CPU seconds of a step, all ranks together, least of the rounds; one thread a rank")
    for name, values in seconds.items():
        ratio, is_cut = min(values) / base, config_of(name).layout.world_size > 1
        goal = GOAL if is_cut else theory(name) * NEAR_THEORY
        rows[name] = {"min_s": min(values), "ratio": ratio, "goal": goal}
        if ratio > goal:
            missed.append(name)
        print(f"  {name:<28} {min(values):6.2f}  {ratio:5.3f}x  goal {goal:.3f}x")
    print(f"goals: {'reached' if not missed else 'MISSED by ' + ', '.join(missed)}")
    record = {"time": time.time(), "commit": _commit(), "torch": torch.__version__, "results": rows}
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
