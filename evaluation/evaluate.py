"""The evaluate stage: a checkpoint and held-out documents become metrics with error bars.

Writes `results.json` (every number, with its normaliser, window, prefix and data digest) and
`documents.parquet` (one row per document), by which two models are compared document by document.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contracts.artifact import Artifact
from contracts.errors import ConfigError
from contracts.files import user_path, write_atomically
from contracts.store import Workspace
from evaluation.checkpoint import step_folder_of, tokenizer_path_of
from evaluation.config import EvaluateConfig
from evaluation.perplexity import DocumentScores, by_document, headline, metrics_of
from evaluation.rows import Ints
from evaluation.scoring import check_causal, score_rows
from evaluation.windows import document_rows
from preprocessing.dataset.token_dataset import TokenDataset, artifact_content, pair_files
from preprocessing.tokenization.loading import load_tokenizer
from preprocessing.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer
from training.config import ModelConfig
from training.step_folders import read_info

RESULTS, DOCUMENTS = "results.json", "documents.parquet"


@dataclass(frozen=True)
class HeldOut:
    """Held-out documents, ready to score.

    Args:
        dataset: Token ids.
        tokenizer: That made them.
        eod_id: End-of-document token that ends each of them and is not scored; None if none does.
        count: Documents to score, from the first.
    """

    dataset: TokenDataset
    tokenizer: Tokenizer
    eod_id: int | None
    count: int


def evaluate(settings: EvaluateConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Measure a checkpoint; return the summary.

    Raises:
        ConfigError: Checkpoint or data are missing, or belong to different tokenizers.
        InputError: Checkpoint or data are damaged.
    """
    checkpoint = _checkpoint(settings, inputs)
    folder = step_folder_of(checkpoint, settings.step)
    info = read_info(folder)
    check_causal(ModelConfig.model_validate(info.model))
    held_out = open_data(_data(settings, inputs), checkpoint, settings.max_documents)
    prefix = _prefix_token(held_out)
    window = settings.seq_length or info.seq_length
    texts = (_without_eod(held_out.dataset.document(n), held_out.eod_id) for n in range(held_out.count))
    rows, owners = document_rows(texts, prefix=prefix, window=window)
    workspace.progress.note(f"step {info.step}: {held_out.count} documents, {int(rows.lengths.sum())} tokens to score")
    scores = score_rows(
        folder,
        rows,
        progress=workspace.progress,
        precision=settings.precision,
        batch_tokens=settings.batch_tokens,
        data_parallel=settings.data_parallel,
        threads_per_rank=settings.threads_per_rank,
        device=settings.device,
        logs=workspace.path / "logs",
        averaged=settings.ema,
    )
    documents = by_document(scores, owners, _subsets_of(held_out), _bytes_of(held_out))
    metrics = metrics_of(documents)
    how = {
        "normaliser": "perplexity per token, bits_per_byte per UTF-8 byte of the text",
        "window_tokens": window,
        "windows": "disjoint; the first behind the prefix token, later ones behind the token before them",
        "prefix_token": held_out.tokenizer.token(prefix),
        "scores_end_of_document": False,
        "precision": settings.precision,
        **({"weights": "moving average"} if settings.ema else {}),
        # How many copies share the rows changes nothing, and so does not stand in the result.
        "layout": {name: value for name, value in info.layout.items() if name != "data_parallel"},
        "data": _data_digest(settings, inputs, workspace),
        "interval": "95 %, bootstrap over documents, 1000 resamples",
    }
    result = {"step": info.step, "task": "perplexity", "how": how, "metrics": metrics}
    write_atomically(workspace.path / RESULTS, json.dumps(result, indent=1) + "\n")
    _write_documents(workspace.path / DOCUMENTS, documents)
    subsets_summary = {name: headline(group) for name, group in metrics["subsets"].items()}
    flat = {key: value for key, value in metrics.items() if key != "subsets"}
    return {"step": info.step, "metrics": {**flat, "subsets": subsets_summary}, "how": how}


def _checkpoint(settings: EvaluateConfig, inputs: Mapping[str, Artifact]) -> Path:
    if "checkpoint" in inputs and settings.checkpoint is not None:
        raise ConfigError("evaluate: both a checkpoint artifact and evaluate.checkpoint are given. Keep one.")
    if "checkpoint" in inputs:
        return inputs["checkpoint"].path
    if settings.checkpoint is None:
        raise ConfigError("evaluate: no checkpoint. Give --checkpoint PATH, or set evaluate.checkpoint.")
    return user_path(settings.checkpoint)


def _data(settings: EvaluateConfig, inputs: Mapping[str, Artifact]) -> Path:
    if "dataset" in inputs and settings.data is not None:
        raise ConfigError("evaluate: both a dataset artifact and evaluate.data are given. Keep one.")
    if "dataset" in inputs:
        return inputs["dataset"].path
    if settings.data is None:
        raise ConfigError("evaluate: no data. Give --data with a dataset artifact, a .bin/.idx prefix or text.")
    return user_path(settings.data)


def _data_digest(
    settings: EvaluateConfig, inputs: Mapping[str, Artifact], workspace: Workspace
) -> str | dict[str, str]:
    """Return what the data are known by: the fingerprint of an input, else content or sha256 of files."""
    if "dataset" in inputs:
        return inputs["dataset"].fingerprint
    path = _data(settings, inputs)
    return artifact_content(path) or workspace.store.digest_all(pair_files(path))


def open_data(path: Path, checkpoint: Path, max_documents: int | None = None) -> HeldOut:
    """Open held-out data, and check that it was made with the checkpoint's tokenizer.

    Args:
        path: As for `TokenDataset`.
        checkpoint: Folder of the artifact or run.
        max_documents: Open the first documents only.

    Raises:
        ConfigError: Neither the data nor the checkpoint has a tokenizer, or they differ.
    """
    dataset = TokenDataset(path)
    own = path / "tokenizer" if (path / "tokenizer" / TOKENIZER_FILE).is_file() else None
    other = tokenizer_path_of(checkpoint)
    if own is None and other is None:
        raise ConfigError(
            f"neither {path} nor {checkpoint} has a tokenizer, so bytes and the prefix token are unknown. "
            f"Put tokenizer.json into {checkpoint / 'tokenizer'}."
        )
    tokenizer = load_tokenizer(own or other or path)
    if own is not None and other is not None:
        expected = load_tokenizer(other)
        if expected.vocab != tokenizer.vocab:
            raise ConfigError(
                f"{path} was tokenized with another tokenizer than the model's ({other}). Ingest the text again with "
                f"--tokenizer {other}."
            )
    eod = tokenizer.eod_id
    count = min(dataset.num_documents, max_documents or dataset.num_documents)
    has_eod = eod is not None and count > 0 and bool((dataset.last_tokens(count) == eod).all())
    return HeldOut(dataset, tokenizer, eod if has_eod else None, count)


def _prefix_token(held_out: HeldOut) -> int:
    prefix = held_out.eod_id if held_out.eod_id is not None else held_out.tokenizer.eod_id
    if prefix is None:
        raise ConfigError(
            f"the tokenizer {held_out.tokenizer.source} has no end-of-document token to stand before a document, so "
            "its first token cannot be scored. Use a tokenizer with one, such as <|endoftext|>."
        )
    return prefix


def _subsets_of(held_out: HeldOut) -> list[str]:
    names = held_out.dataset.column("subset") or [""] * held_out.count
    return [name or "" for name in names[: held_out.count]]


def _without_eod(document: Any, eod_id: int | None) -> Any:
    return document if eod_id is None else document[:-1]


def _bytes_of(held_out: HeldOut) -> Ints:
    """UTF-8 bytes of each text: as ingest counted them, else of the decoded tokens."""
    count = held_out.count
    known = held_out.dataset.column("bytes")
    if known is not None and None not in known[:count]:  # an imported dataset does not know them
        return np.asarray(known[:count], dtype=np.int64)
    texts = (_without_eod(held_out.dataset.document(n), held_out.eod_id) for n in range(count))
    sizes = (len(held_out.tokenizer.decode(text).encode()) for text in texts)
    return np.fromiter(sizes, dtype=np.int64, count=count)


def _write_documents(path: Path, scores: DocumentScores) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "document": np.arange(len(scores.nats)),
            "subset": list(scores.subsets),
            "bytes": scores.num_bytes,
            "tokens": scores.num_tokens,
            "nats": scores.nats,
            "greedy_tokens": scores.num_greedy,
        }
    )
    temporary = path.with_suffix(".tmp")
    pq.write_table(table, temporary, compression="zstd")
    temporary.replace(path)
