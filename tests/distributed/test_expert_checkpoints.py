"""Checkpoints of experts, which are fused in memory and apart on the disk: resumed and reshaped at other layouts."""

from pathlib import Path
from typing import Any

import pytest
from conversion_cases import convert
from ranks import run_on_ranks
from training_cases import curve, new_trainer, relative_difference, tiny_config
from whole_checkpoint import whole_tensors

from conversion.catalogue import equal_bits
from training.checkpoint import load_checkpoint, save_checkpoint
from training.config import PretrainConfig
from training.safe_pickle import read_dcp_metadata

SAVED_AT = (2, 1, 2)
MODEL: dict[str, Any] = {
    "hidden_size": 48,
    "num_layers": 3,
    "num_query_groups": 2,
    "vocab_multiple": 2,
    "moe": {
        "num_experts": 4,
        "top_k": 2,
        "ffn_hidden_size": 36,
        "shared_ffn_hidden_size": 24,
        "aux_loss_coef": 0.05,
        "layer_interval": 2,
    },
}
Curve = list[tuple[float, float]]


def _config(layout: tuple[int, int, int]) -> PretrainConfig:
    return tiny_config("qwen2", layout, global_batch_size=12, model=MODEL)


def _save_after_two(config: PretrainConfig, root: Path) -> Curve:
    trainer = new_trainer(config)
    curve(trainer, 2)
    save_checkpoint(trainer, root, keep_last=1)
    return curve(trainer, 2)


def _go_on(config: PretrainConfig, folder: Path) -> Curve:
    trainer = new_trainer(config.model_copy(update={"seed": config.seed + 1}))
    load_checkpoint(trainer, folder)
    return curve(trainer, 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Curve]:
    root = tmp_path_factory.mktemp("experts")
    found: Curve = run_on_ranks(4, _save_after_two, _config(SAVED_AT), root)[0]
    return root / "step-00000002", found


@pytest.mark.parametrize("layout", [SAVED_AT, (1, 1, 1), (2, 2, 1), (1, 1, 3)], ids=str)
def test_a_run_with_experts_goes_on_at_any_layout(saved: tuple[Path, Curve], layout: tuple[int, int, int]) -> None:
    folder, expected = saved

    found = run_on_ranks(layout[0] * layout[1] * layout[2], _go_on, _config(layout), folder)[0]

    assert found == expected if layout == SAVED_AT else relative_difference(found, expected) < 1e-12


def test_experts_are_reshaped_bit_by_bit_into_the_files_that_training_writes(
    saved: tuple[Path, Curve], tmp_path: Path
) -> None:
    folder, _ = saved
    tp, pp, dp = SAVED_AT

    there = convert(folder, tmp_path / "there", pipeline_parallel=2)
    back = convert(there, tmp_path / "back", tensor_parallel=tp, pipeline_parallel=pp, data_parallel=dp)

    first, second = whole_tensors(folder), whole_tensors(back.path / folder.name)
    assert first.keys() == second.keys() and len(first) > 100
    assert all(equal_bits(first[name], second[name]) for name in first)
    assert _placement(folder) == _placement(back.path / folder.name)


def _placement(folder: Path) -> dict[tuple[str, tuple[int, ...]], str]:
    """The file of each piece; the gate of the shared expert has one row, so that some ranks hold an empty piece."""
    metadata = read_dcp_metadata(folder)
    files = {(i.fqn, tuple(i.offset or ())): s.relative_path for i, s in metadata.storage_data.items()}
    return {
        (name, tuple(chunk.offsets)): files[name, tuple(chunk.offsets)]
        for name, entry in metadata.state_dict_metadata.items()
        for chunk in entry.chunks
        if 0 not in chunk.sizes
    }
