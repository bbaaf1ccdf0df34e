"""Saving 300 M parameters with their optimizer state, against a raw write and fsync of the same bytes.

Prints three numbers with their goals: time of a save to raw, memory that a save adds, and the share of a
save's time that training stands still for one behind it, in the call and before the next update.
Contestants take turns in one run, and the least of their times counts, since the disk is shared.
`python benchmarks/checkpoint.py [--folder DIR] [--rounds N] [--layers N]`
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from training.checkpoint import save_checkpoint, state_tensors
from training.config import PretrainConfig
from training.mesh import build_mesh, init_single_rank
from training.saver import Saver
from training.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "checkpoint.jsonl"
GOAL_RAW, GOAL_MEMORY_MIB, GOAL_BLOCKED = 1.3, 64, 0.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24, help="of 1024 channels: 24 make 303 M parameters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    init_single_rank()
    trainer = Trainer(_config(options.layers), build_mesh(_config(options.layers).layout))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        found = _measure(trainer, Path(name), options.rounds)
    dist.destroy_process_group()
    return _report(found)


def _config(layers: int) -> PretrainConfig:
    model = {
        "family": "gpt2",
        "num_layers": layers,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "vocab_size": 1024,
        "max_position_embeddings": 128,
    }
    batch = {"seq_length": 128, "micro_batch_size": 1, "global_batch_size": 1, "train_steps": 1000}
    return PretrainConfig.model_validate({"model": model, **batch, "async_save": True})


def _measure(trainer: Trainer, root: Path, rounds: int) -> dict[str, list[float]]:
    tensors = list(state_tensors(trainer.parameters, trainer.mesh, trainer.optimizer).values())
    parts = [tensor.to_local() for tensor in tensors]  # type: ignore[attr-defined]
    size_bytes = sum(part.numel() * part.element_size() for part in parts)
    times = ("raw_s", "save_s", "blocked_s", "behind_s", "step_s", "step_beside_s")
    found: dict[str, list[float]] = {name: [] for name in times}
    found |= {"size_bytes": [float(size_bytes)], "added_bytes": []}
    saver = Saver(trainer, root)
    wait, waited = trainer.before_update or (lambda: None), list[float]()
    trainer.before_update = lambda: waited.append(_seconds(wait))
    for _ in range(rounds):
        found["raw_s"].append(_seconds(lambda: _write_raw(parts, root / "raw")))
        (root / "raw").unlink()
        with _peak_growth(found["added_bytes"]):
            found["save_s"].append(_seconds(lambda: save_checkpoint(trainer, root, keep_last=1)))
        found["step_s"].append(_seconds(lambda: trainer.train_step(_Rows())))
        waited.clear()
        started = time.perf_counter()
        blocked_s = _seconds(saver.save)
        found["step_beside_s"].append(_seconds(lambda: trainer.train_step(_Rows())))
        found["blocked_s"].append(blocked_s + sum(waited))
        saver.wait()
        found["behind_s"].append(time.perf_counter() - started)
    return found


class _Rows:
    """Any tokens do."""

    def tokens(self, sample_ids: Sequence[int]) -> np.ndarray:
        return np.random.default_rng(0).integers(0, 1000, (len(sample_ids), 129))


def _write_raw(parts: list[torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        for part in parts:
            file.write(part.numpy())
        file.flush()
        os.fsync(file.fileno())


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def _peak_growth(into: list[float]) -> Iterator[None]:
    """Append the most by which the process's own memory grew meanwhile, looked at every few milliseconds."""
    before, most, is_over = _own_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            most[0] = max(most[0], _own_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    is_over.set()
    thread.join()
    into.append(float(max(0, most[0] - before)))


def _own_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _report(found: dict[str, list[float]]) -> int:
    raw, save, blocked, behind = (min(found[name]) for name in ("raw_s", "save_s", "blocked_s", "behind_s"))
    added = max(found["added_bytes"]) / 2**20
    size = found["size_bytes"][0]
    print(f"{size / 2**30:.2f} GiB of parameters and optimizer state, one rank")
    print(f"  raw write and fsync        {raw:6.2f} s  ({size / raw / 2**20:.0f} MiB/s)")
    print(f"  save                       {save:6.2f} s")
    print(f"  save behind: stands still  {blocked:6.2f} s; whole after {behind:.2f} s")
    print(f"  a step without, beside it  {min(found['step_s']):6.2f} s, {min(found['step_beside_s']):.2f} s")
    checks = (
        ("save / raw", save / raw, GOAL_RAW),
        ("stands still / save", blocked / save, GOAL_BLOCKED),
        ("MiB that a save adds", added, GOAL_MEMORY_MIB),
    )
    for name, value, goal in checks:
        print(f"  {name:<26} {value:6.3f}  goal {goal}: {'reached' if value <= goal else 'MISSED'}")
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), "torch": torch.__version__, **found}) + "\n")
    return 0 if all(value <= goal for _, value, goal in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
