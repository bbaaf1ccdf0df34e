"""The evaluate and report stages. Importing this imports neither torch nor a plotting package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.artifact import Artifact
from contracts.files import user_path
from contracts.stage import Stage
from contracts.store import Workspace
from evaluation.config import DataCardConfig, EvaluateConfig, ReportConfig


def _evaluate(settings: EvaluateConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    from evaluation.evaluate import evaluate

    return evaluate(settings, inputs, workspace)


def _report(settings: ReportConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    from evaluation.report import report

    return report(settings, inputs, workspace)


def _data_card(settings: DataCardConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    from evaluation.data_card import data_card

    return data_card(settings, inputs, workspace)


def _raw_files(settings: EvaluateConfig) -> dict[str, Path]:
    from evaluation.checkpoint import step_folder_of, tokenizer_path_of
    from preprocessing.dataset.token_dataset import pair_files

    files: dict[str, Path] = {}
    if settings.checkpoint is not None:
        checkpoint = user_path(settings.checkpoint)
        files["checkpoint/manifest.json"] = step_folder_of(checkpoint, settings.step) / "manifest.json"
        if (tokenizer := tokenizer_path_of(checkpoint)) is not None:
            files["checkpoint/tokenizer.json"] = tokenizer / "tokenizer.json"
    if settings.data is not None:
        files |= {f"data{name}": file for name, file in pair_files(settings.data).items()}
    return files


def _raw(settings: EvaluateConfig) -> dict[str, str]:
    """Name a dataset artifact given by path by its content."""
    from preprocessing.dataset.token_dataset import artifact_content

    content = artifact_content(settings.data) if settings.data is not None else None
    return {} if content is None else {"data": content}


EVALUATE = Stage(
    name="evaluate",
    version=1,
    kind="evaluation",
    settings=EvaluateConfig,
    work=_evaluate,
    raw_files=_raw_files,
    raw=_raw,
)
REPORT = Stage(name="report", version=1, kind="report", settings=ReportConfig, work=_report)
DATA_CARD = Stage(name="data-card", version=1, kind="report", settings=DataCardConfig, work=_data_card)
