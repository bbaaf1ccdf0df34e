"""Peak memory of a training step at several layouts against what `estimate` says, on the CPU.

Each case runs in fresh processes; the peak is that of the resident memory over what the process holds when a tiny
model has been trained before. Prints a table and the goal. `python benchmarks/memory.py [NAME ...]`
"""

import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from training.config import PretrainConfig
from training.estimate import estimate
from training.mesh import build_mesh
from training.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "memory.jsonl"
GOAL = 0.10
SMALL = {"hidden_size": 256, "num_layers": 8}
LARGE = {"hidden_size": 512, "num_layers": 8}
GROUPED = {"num_query_groups": 4, "num_layers": 4}


def main() -> int:
    cases = {name: case for name, case in _cases().items() if not sys.argv[1:] or name in sys.argv[1:]}
    worst, found = 0.0, {}
    for name, case in cases.items():
        config = PretrainConfig.model_validate(case)
        expected = estimate(config).memory_per_rank_bytes
        measured = _measure(case, config.layout.world_size)
        found[name] = {"measured": measured, "estimated": expected}
        worst = max(worst, abs(expected / measured - 1))
        text = f"measured {measured / 2**20:6.0f} MiB  estimated {expected / 2**20:6.0f} MiB"
        print(f"  {name:<34} {text}  {expected / measured:.2f}", flush=True)
    print(f"goal: within {GOAL:.0%}: {'reached' if worst <= GOAL else 'MISSED'} (worst {worst:.1%})")
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), "torch": torch.__version__, "results": found}) + "\n")
    return 0 if worst <= GOAL else 1


def _cases() -> dict[str, dict[str, Any]]:
    moe = {"num_experts": 4, "top_k": 2}
    return {
        "one rank, two micro-batches": _case(LARGE, micro=4, rows=8),
        "one rank, one micro-batch": _case(LARGE, micro=4, rows=4),
        "bf16": _case(LARGE, micro=4, rows=8, precision="bf16"),
        "recompute: full": _case(SMALL, recompute="full"),
        "recompute: selective": _case(SMALL, recompute="selective"),
        "recompute: full, half of the layers": _case(SMALL, recompute="full", recompute_layers=[0, 1, 2, 3]),
        "llama": _case({**SMALL, "family": "llama", **GROUPED}),
        "experts": _case({**SMALL, "family": "mixtral", "moe": moe, **GROUPED}, micro=8, rows=8),
        "tensor 2": _case(SMALL, layout={"tensor_parallel": 2}),
        "tensor 2, whole sequences": _case(SMALL, layout={"tensor_parallel": 2, "sequence_parallel": False}),
        "pipeline 2": _case(SMALL, micro=8, rows=32, layout={"pipeline_parallel": 2}),
        "pipeline 2, zero_bubble": _case(
            SMALL, micro=8, rows=32, layout={"pipeline_parallel": 2, "schedule": "zero_bubble"}
        ),
        "pipeline 2, zbv": _case(SMALL, micro=8, rows=32, layout={"pipeline_parallel": 2, "schedule": "zbv"}),
        "data 2": _case(LARGE, micro=4, rows=8, layout={"data_parallel": 2}),
        "data 2, shard: parameters": _case(LARGE, micro=4, rows=8, layout={"data_parallel": 2, "shard": "parameters"}),
    }


def _case(model: dict[str, Any], *, micro: int = 16, rows: int = 16, **more: Any) -> dict[str, Any]:
    sizes = {"num_attention_heads": 8, "vocab_size": 8192, "max_position_embeddings": 512}
    batch = {"seq_length": 512, "micro_batch_size": micro, "global_batch_size": rows, "train_steps": 1000}
    return {"model": {**sizes, **model}, **batch, **more}


def _measure(case: dict[str, Any], num_ranks: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        # Spawned: what a process has freed before would hide what it needs.
        mp.start_processes(_run_rank, (num_ranks, folder, case), nprocs=num_ranks, start_method="spawn")
        return max(int((Path(folder) / str(rank)).read_text()) for rank in range(num_ranks))


def _run_rank(rank: int, num_ranks: int, folder: str, case: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is freed goes back at once
    libc.mallopt(-1, 65536)  # M_TRIM_THRESHOLD
    _train(_tiny(case), steps=1)
    gc.collect()
    libc.malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    _train(case, steps=2)
    (Path(folder) / str(rank)).write_text(str(_status("VmHWM") - before))
    dist.destroy_process_group()


def _tiny(case: dict[str, Any]) -> dict[str, Any]:
    model = {**case["model"], "hidden_size": 64, "vocab_size": 128, "max_position_embeddings": 16}
    return {**case, "model": model, "seq_length": 16}


def _train(case: dict[str, Any], *, steps: int) -> None:
    config = PretrainConfig.model_validate(case)
    trainer, rows = Trainer(config, build_mesh(config.layout)), _Rows(config)
    for _ in range(steps):
        trainer.train_step(rows)


class _Rows:
    """Any tokens do."""

    def __init__(self, config: PretrainConfig) -> None:
        self.vocab_size, self.length = config.model.vocab_size or 1, config.seq_length + 1

    def tokens(self, sample_ids: Sequence[int]) -> np.ndarray:
        return np.random.default_rng(0).integers(0, self.vocab_size, (len(sample_ids), self.length))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
