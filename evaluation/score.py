"""Log-probabilities of continuations, for the `score` command."""

import json
from pathlib import Path

from contracts.progress import Progress
from evaluation.checkpoint import step_folder_of, tokenizer_of
from evaluation.requests import read_requests
from evaluation.rows import rows_of
from evaluation.scoring import score_rows
from training.config import DeviceSetting


def score_file(
    checkpoint: Path,
    input_file: Path,
    *,
    step: int | None,
    batch_tokens: int,
    progress: Progress,
    device: DeviceSetting = "auto",
) -> list[str]:
    """Score a JSONL file of `{"context", "continuation"}`.

    Returns:
        One JSON line per request, in order: log_probability (nats, summed over the continuation),
        num_tokens, is_greedy, was_split (context and continuation had to be encoded apart).

    Raises:
        ConfigError: The file or the tokenizer is missing.
        InputError: A line is no request, or the checkpoint is damaged.
    """
    tokenizer = tokenizer_of(checkpoint)
    requests = read_requests(input_file, tokenizer)
    rows = rows_of([item.tokens for item in requests], [item.first_target for item in requests])
    folder = step_folder_of(checkpoint, step)
    scores = score_rows(folder, rows, progress=progress, batch_tokens=batch_tokens, device=device)
    return [
        json.dumps(
            {
                "log_probability": float(scores.log_prob[n]),
                "num_tokens": int(scores.num_scored[n]),
                "is_greedy": bool(scores.num_greedy[n] == scores.num_scored[n]),
                "was_split": request.was_split,
            }
        )
        + "\n"
        for n, request in enumerate(requests)
    ]
