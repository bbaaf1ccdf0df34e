"""What each rank of an evaluation does with its job.

The model is loaded at the job's layout. Batches are dealt to the data-parallel copies in turn;
each copy writes one `scores-N.npz`.
"""

import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from contracts.files import write_atomically
from evaluation.rows import Ints, Rows, RowScores, batches, padded_batch
from evaluation.scoring import Job
from training.checkpoint import load_model
from training.device import choose_device, ranks_here
from training.launch import tell
from training.mesh import Mesh, build_mesh, init_ranks
from training.model import compute_dtype
from training.scoring import Scorer


def score_job(path: Path) -> None:
    """Score the rows of a job file."""
    job = Job.from_json(path.read_text(encoding="utf-8"))
    device, note = choose_device(job.device, ranks_here(job.layout.world_size))
    init_ranks(device, timeout_s=job.timeout_s)
    mesh = build_mesh(job.layout, device)
    if note is not None and dist.get_rank() == 0:
        tell(note)
    rows = Rows.load(Path(job.folder) / "rows.npz")
    folder = Path(job.checkpoint)
    stages = load_model(folder, mesh, precision=job.precision, max_length=job.max_length, averaged=job.averaged)
    scorer = Scorer(stages, mesh, dtype=compute_dtype(job.precision))
    numbers, scores = score(scorer, mesh, rows, job)
    if mesh.is_last_stage and mesh.rank("tp") == 0 and mesh.rank("cp") == 0:
        save(Path(job.folder) / f"scores-{mesh.rank('dp')}.npz", numbers, scores)
    dist.barrier()
    dist.destroy_process_group()


def score(scorer: Scorer, mesh: Mesh, rows: Rows, job: Job) -> tuple[Ints, RowScores]:
    """Score the batches of this data-parallel copy; return row numbers and their results."""
    multiple = mesh.layout.sequence_unit
    all_batches = list(batches(rows, batch_tokens=job.batch_tokens, multiple=multiple))
    mine = all_batches[mesh.rank("dp") :: mesh.size("dp")]
    log_prob, scored, greedy, done = [], [], [], 0
    for batch in mine:
        inputs, targets = (torch.from_numpy(x).to(mesh.device) for x in padded_batch(rows, batch, multiple))
        values, is_greedy = scorer.log_probs(inputs, targets)
        log_prob.append(values.double().sum(dim=1).cpu().numpy())
        scored.append((targets >= 0).sum(dim=1).cpu().numpy())
        greedy.append(is_greedy.sum(dim=1).cpu().numpy())
        done += len(batch)
        if dist.get_rank() == 0:
            report(Path(job.folder) / "progress.json", done * mesh.size("dp"), len(rows))
    numbers = np.concatenate([*mine, np.empty(0, np.int64)])
    empty = np.empty(0)
    parts = [np.concatenate([*part, empty]) for part in (log_prob, scored, greedy)]
    return numbers, RowScores(parts[0], parts[1].astype(np.int64), parts[2].astype(np.int64))


def report(path: Path, done: int, total: int) -> None:
    """Leave word for the launcher how far the work is."""
    write_atomically(path, json.dumps({"done": min(done, total), "total": total}), is_durable=False)


def save(path: Path, numbers: Ints, scores: RowScores) -> None:
    """Write the results of one copy."""
    np.savez(path, numbers=numbers, log_prob=scores.log_prob, scored=scores.num_scored, greedy=scores.num_greedy)
