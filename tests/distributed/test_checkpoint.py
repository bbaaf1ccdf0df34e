"""Checkpoints: bit-equal resume at the same layout, exact weights and the same samples at any other."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_on_ranks
from torch import Tensor
from training_cases import PatternSource, curve, new_trainer, relative_difference, tiny_config
from whole_checkpoint import whole_tensors

from contracts.errors import InputError, ShardlineError
from training.checkpoint import load_checkpoint, load_model, save_checkpoint
from training.config import PretrainConfig
from training.mesh import build_mesh
from training.scoring import Scorer
from training.step_folders import read_info

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 1, 3)]
Curve = list[tuple[float, float]]


def _save_after_three(config: PretrainConfig, root: Path) -> Curve:
    trainer = new_trainer(config)
    curve(trainer, 3)
    save_checkpoint(trainer, root, keep_last=1)
    return curve(trainer, 3)


def _go_on(config: PretrainConfig, folder: Path) -> tuple[Curve, int]:
    trainer = new_trainer(config.model_copy(update={"seed": config.seed + 1}))
    load_checkpoint(trainer, folder)
    return curve(trainer, 3), trainer.consumed_samples


def _config(family: str, layout: tuple[int, int, int]) -> PretrainConfig:
    # 12 rows a step, so that three data-parallel ranks can share them; 30 columns for their share of gate and up.
    model = {"hidden_size": 48, "num_attention_heads": 4, "ffn_hidden_size": 56, "vocab_multiple": 2}
    return tiny_config(family, layout, global_batch_size=12, model=model)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict]:
    """A checkpoint of step 3 at every layout, and the losses of the three steps after it."""
    root = tmp_path_factory.mktemp(request.param)
    curves = {}
    for layout in LAYOUTS:
        config = _config(request.param, layout)
        curves[layout] = run_on_ranks(config.layout.world_size, _save_after_three, config, root / str(layout))[0]
    return request.param, root, curves


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_going_on_at_the_same_layout_is_bit_equal(saved: tuple[str, Path, dict], layout: tuple[int, int, int]) -> None:
    family, root, curves = saved
    config = _config(family, layout)

    found, consumed = run_on_ranks(config.layout.world_size, _go_on, config, root / str(layout) / "step-00000003")[0]

    assert found == curves[layout]
    assert consumed == 6 * 12


@pytest.mark.parametrize("target", [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 1, 3)], ids=str)
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_any_layout_goes_on_from_any_other(
    saved: tuple[str, Path, dict], source: tuple[int, int, int], target: tuple[int, int, int]
) -> None:
    family, root, curves = saved
    config = _config(family, target)

    found, _ = run_on_ranks(config.layout.world_size, _go_on, config, root / str(source) / "step-00000003")[0]

    assert relative_difference(found, curves[source]) < 1e-12


def test_every_layout_stores_the_same_tensors(saved: tuple[str, Path, dict]) -> None:
    _, root, _ = saved
    reference = whole_tensors(root / str((1, 1, 1)) / "step-00000003")
    info = read_info(root / str((1, 1, 1)) / "step-00000003")
    assert set(reference) == {n for p in info.parameters for n in (p, f"optim.{p}.exp_avg", f"optim.{p}.exp_avg_sq")}
    for layout in LAYOUTS[1:]:
        tensors = whole_tensors(root / str(layout) / "step-00000003")
        assert tensors.keys() == reference.keys()
        for name, tensor in tensors.items():
            assert torch.allclose(tensor, reference[name], rtol=1e-10, atol=1e-10), (layout, name)


def _score(config: PretrainConfig, folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    mesh = build_mesh(config.layout)
    scorer = Scorer(load_model(folder, mesh, precision="float64"), mesh, dtype=torch.float64)
    tokens = torch.from_numpy(PatternSource().tokens(np.arange(3)))
    log_probs, is_greedy = scorer.log_probs(tokens[:, :-1], tokens[:, 1:])
    return log_probs, is_greedy, scorer.logits(tokens[:, :-1])


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)], ids=str)
def test_scores_are_the_same_at_every_layout(saved: tuple[str, Path, dict], layout: tuple[int, int, int]) -> None:
    family, root, _ = saved
    config = _config(family, layout)
    targets = torch.from_numpy(PatternSource().tokens(np.arange(3)))[:, 1:]

    results = run_on_ranks(config.layout.world_size, _score, config, root / str((2, 1, 1)) / "step-00000003")

    for log_probs, is_greedy, logits in results:
        expected = logits.log_softmax(-1).gather(2, targets.unsqueeze(2)).squeeze(2)
        assert torch.allclose(log_probs, expected, rtol=0, atol=1e-12)
        assert torch.equal(is_greedy, logits.argmax(-1) == targets)
        assert torch.equal(logits, results[0][2])


def _load_into_another_model(config: PretrainConfig, folder: Path) -> str:
    trainer = new_trainer(config)
    try:
        load_checkpoint(trainer, folder)
    except InputError as error:
        return str(error)
    return "loaded"


def test_a_checkpoint_of_another_model_is_refused_by_name(saved: tuple[str, Path, dict]) -> None:
    family, root, _ = saved
    config = tiny_config(family, global_batch_size=12)

    message = run_on_ranks(1, _load_into_another_model, config, root / str((1, 1, 1)) / "step-00000003")[0]

    assert "embedding.word.weight has shape (100, 48)" in message
    assert "ask for (128, 32)" in message


def _message_of(function: str, config: PretrainConfig, root: Path) -> str:
    trainer = new_trainer(config)
    try:
        if function == "save":
            save_checkpoint(trainer, root, keep_last=1)
        else:
            load_checkpoint(trainer, root)
    except ShardlineError as error:
        return str(error)
    return "no error"


def test_damaged_data_is_an_error_that_names_the_folder(saved: tuple[str, Path, dict], tmp_path: Path) -> None:
    family, root, _ = saved
    folder = tmp_path / "step-00000003"
    shutil.copytree(root / str((1, 1, 1)) / folder.name, folder)
    data = folder / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:1000])

    message = run_on_ranks(1, _message_of, "load", _config(family, (1, 1, 1)), folder)[0]

    assert message.startswith(f"{folder}: the checkpoint cannot be read (")


def test_a_disk_that_refuses_a_save_is_named(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file where a folder should be")

    message = run_on_ranks(1, _message_of, "save", tiny_config("gpt2"), tmp_path / "root")[0]

    assert message.startswith(f"Step 0: the checkpoint could not be written under {tmp_path / 'root'} (")
    assert "the same command goes on from the last whole checkpoint" in message


def _average_scores(config: PretrainConfig, root: Path) -> tuple[bool, str]:
    trainer = new_trainer(config)
    curve(trainer, 3)
    folder = save_checkpoint(trainer, root, keep_last=1)
    tokens = torch.from_numpy(PatternSource().tokens(np.arange(2)))
    if config.optimizer.ema_decay is None:
        try:
            load_model(folder, trainer.mesh, precision="float64", averaged=True)
        except InputError as error:
            return False, str(error)
    stage = load_model(folder, trainer.mesh, precision="float64", averaged=True)
    found = Scorer(stage, trainer.mesh, dtype=torch.float64).logits(tokens[:, :-1])
    with torch.no_grad():
        for number, parameter in enumerate(trainer.parameters):
            parameter.value.copy_(trainer.optimizer.moments(number)["ema"])
    expected = Scorer(trainer.stages, trainer.mesh, dtype=torch.float64).logits(tokens[:, :-1])
    return torch.equal(found, expected), ""


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 2)], ids=str)
def test_the_moving_average_can_be_scored_instead_of_the_weights(layout: tuple[int, int, int], tmp_path: Path) -> None:
    config = tiny_config("llama", layout, optimizer={"ema_decay": 0.7})

    assert all(equal for equal, _ in run_on_ranks(config.layout.world_size, _average_scores, config, tmp_path))


def test_a_checkpoint_without_moving_average_says_how_to_get_one(tmp_path: Path) -> None:
    _, message = run_on_ranks(1, _average_scores, tiny_config("llama"), tmp_path)[0]

    assert "holds no moving average of the weights. Train with optimizer.ema_decay" in message
