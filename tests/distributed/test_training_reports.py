"""Bug reports of people who train models (`shared/cases/REPORTS.md`), each as its "try" says, with the right outcome.

Elsewhere: TRN-31 and TRN-35 in unit/training/test_step_folders.py; TRN-33 and TRN-40 in integration/test_launch.py and
test_pretrain.py; TRN-37 and TRN-38 in distributed/test_saving.py; TRN-42 in test_documents.py; TRN-43 in
test_checkpoint.py; TRN-45 in unit/contracts; TRN-47 in integration/test_continued_training.py. TRN-44 (a test split
that is not there) cannot arise: training measures validation rows only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_on_ranks
from torch import Tensor
from training_cases import PatternSource, new_trainer, relative_difference, tiny_config

from contracts.errors import ShardlineError
from training.checkpoint import load_checkpoint, load_initial, save_checkpoint, state_tensors
from training.config import InitialConfig, PretrainConfig
from training.pipeline_split import layers_of_stages
from training.trainer import Trainer
from training.validation import validation_loss

Layout = tuple[int, int, int]
Curve = list[tuple[float, float]]


class RecordingSource(PatternSource):
    """Remembers which samples were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def tokens(self, sample_ids: Any) -> Any:
        self.read += [int(sample) for sample in sample_ids]
        return super().tokens(sample_ids)


def _steps(trainer: Trainer, count: int, source: Any = None) -> Curve:
    results = [trainer.train_step(source or PatternSource()) for _ in range(count)]
    return [(r.loss_nats, r.gradient_norm) for r in results]


def _world(config: PretrainConfig) -> int:
    return config.layout.world_size


def _curve(config: PretrainConfig) -> Curve:
    return _steps(new_trainer(config), config.train_steps)


def _all_gathered(values: Sequence[Tensor]) -> list[list[Tensor]]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, list(values))
    return found


# --- numbers that depend on the layout -------------------------------------------------------------------------------


def test_trn_01_a_vocabulary_that_does_not_divide_is_refused_or_padded() -> None:
    with pytest.raises(ValueError, match=r"vocab_size \(257\).*not divisible by layout.tensor_parallel \(2\)"):
        tiny_config("gpt2", (2, 1, 1), model={"vocab_size": 257, "vocab_multiple": 1})

    padded = {"model": {"vocab_size": 257}, "precision": "float32", "train_steps": 20}
    one, two = (run_on_ranks(tp, _curve, tiny_config("gpt2", (tp, 1, 1), **padded))[0] for tp in (1, 2))

    assert relative_difference(one, two) < 1e-4


def _gradients(config: PretrainConfig) -> dict[str, Tensor]:
    from reference_models import gradients_of

    tokens = torch.from_numpy(PatternSource().tokens(range(8)))
    return gradients_of(new_trainer(config), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def test_trn_02_gradients_of_a_pipeline_are_divided_like_those_of_one_stage() -> None:
    sgd = {"optimizer": {"kind": "sgd", "lr": 0.5}}
    (whole,) = run_on_ranks(1, _gradients, tiny_config("llama", **sgd))
    parts = run_on_ranks(2, _gradients, tiny_config("llama", (1, 2, 1), **sgd))

    found = {name: gradient for part in parts for name, gradient in part.items()}
    assert found.keys() == whole.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-10, atol=1e-14)
    curves = [run_on_ranks(pp, _curve, tiny_config("llama", (1, pp, 1), **sgd))[0] for pp in (1, 2)]
    assert relative_difference(*curves) < 1e-12


def test_trn_03_the_gradient_norm_does_not_grow_with_the_ranks() -> None:
    curves = []
    for dp in (1, 2, 4):
        for shard in ("none", "optimizer") if dp > 1 else ("optimizer",):
            config = tiny_config("gpt2", (1, 1, dp), train_steps=3, layout_more={"shard": shard})
            curves.append(run_on_ranks(dp, _curve, config)[0])

    for curve in curves[1:]:
        assert relative_difference(curve, curves[0]) < 1e-12


def test_trn_04_stages_are_clipped_by_one_norm() -> None:
    strong = {"optimizer": {"clip_grad": 0.1, "kind": "sgd", "lr": 1.0}, "train_steps": 4}
    one, two = (run_on_ranks(pp, _curve, tiny_config("gpt2", (1, pp, 1), **strong)) for pp in (1, 2))

    assert two[0] == two[1]  # every rank says the same
    assert relative_difference(two[0], one[0]) < 1e-12
    assert min(norm for _, norm in one[0]) > 0.1  # so that clipping is what moves the weights


def _tables(config: PretrainConfig) -> tuple[list[bool], Curve]:
    trainer = new_trainer(config)
    equal, curve = [], []
    for _ in range(10):
        curve += _steps(trainer, 1)
        tables = [p.value for p in trainer.parameters if p.spec.canonical_name == "embedding.word.weight"]
        everywhere = _all_gathered(tables)
        of_dp = [everywhere[rank][0] for rank in range(len(everywhere)) if everywhere[rank]]
        halves = len(of_dp) // 2
        equal.append(all(torch.equal(a, b) for a, b in zip(of_dp[:halves], of_dp[halves:], strict=True)))
    return equal, curve


def test_trn_05_copies_of_a_tied_table_stay_bit_equal() -> None:
    sgd = {"optimizer": {"kind": "sgd", "lr": 0.5}, "model": {"tied_embeddings": True}}
    equal, found = run_on_ranks(4, _tables, tiny_config("gpt2", (1, 2, 2), **sgd))[0]
    reference = run_on_ranks(1, _curve, tiny_config("gpt2", **sgd))[0]

    assert equal == [True] * 10
    assert relative_difference(found, reference) < 1e-12


def _replicas(config: PretrainConfig) -> tuple[list[str], Curve]:
    trainer = new_trainer(config)
    curve = _steps(trainer, 20)
    whole = {p.spec.canonical_name: p.value for p in trainer.parameters if p.spec.tp_dim is None}
    mine, other = _all_gathered(list(whole.values()))
    return [name for name, a, b in zip(whole, mine, other, strict=True) if not torch.equal(a, b)], curve


def test_trn_08_replicated_weights_are_bit_equal_on_tensor_parallel_ranks() -> None:
    config = tiny_config("llama", (2, 1, 1), train_steps=20, precision="float32")
    drifted, found = run_on_ranks(2, _replicas, config)[0]
    reference = run_on_ranks(1, _curve, tiny_config("llama", train_steps=20, precision="float32"))[0]

    assert drifted == []
    assert relative_difference(found, reference) < 1e-3


# --- arithmetic that must hold before a process starts ---------------------------------------------------------------


@pytest.mark.parametrize(("layers", "stages"), [(3, 2), (30, 4), (5, 4)])
def test_trn_09_no_layer_is_lost_when_stages_do_not_divide_them(layers: int, stages: int) -> None:
    config = tiny_config("gpt2", (1, stages, 1), model={"num_layers": layers})

    dealt = layers_of_stages(config.model, config.layout)

    assert [layer for stage in dealt for layer in stage] == list(range(layers))
    with pytest.raises(ValueError, match=rf"deals {layers - 2} layers, and model.num_layers is {layers}"):
        split = [layers - 2 - (stages - 1), *[1] * (stages - 1)]
        tiny_config("gpt2", (1, stages, 1), model={"num_layers": layers}, layout_more={"pipeline_split": split})


@pytest.mark.parametrize(
    ("heads", "groups", "message"),
    [
        (6, 6, r"num_attention_heads \(6\) / layout.tensor_parallel \(4\) leaves a remainder of 2"),
        (8, 2, r"num_query_groups \(2\) / layout.tensor_parallel \(4\) leaves a remainder of 2"),
    ],
)
def test_trn_11_heads_that_do_not_divide_are_refused_by_name(heads: int, groups: int, message: str) -> None:
    model = {"hidden_size": 48, "num_attention_heads": heads, "num_query_groups": groups}
    with pytest.raises(ValueError, match=message):
        tiny_config("llama", (4, 1, 1), model=model)


def test_trn_18_the_batch_check_knows_how_far_a_growing_batch_is() -> None:
    grown = {"rampup_batch_size": (4, 4, 40), "micro_batch_size": 1}
    config = tiny_config("gpt2", (1, 1, 8), **grown)

    config.check_batches_after(40)
    with pytest.raises(ValueError, match=r"the batch of rampup_batch_size \(4\).*leaves a remainder"):
        config.check_batches_after(0)


def test_trn_22_a_schedule_in_mid_course_without_its_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="needs optimizer: true"):
        InitialConfig(position=True)


# --- a resumed run is the same run -----------------------------------------------------------------------------------


def _save_and_read(config: PretrainConfig, root: Path, step: int, steps: int) -> tuple[list[int], Curve]:
    """Samples that all ranks read from `step` on, saving there; and the numbers of these steps."""
    trainer, source = new_trainer(config), RecordingSource()
    _steps(trainer, step)
    save_checkpoint(trainer, root, keep_last=1)
    curve = _steps(trainer, steps, source)
    return source.read, curve


def _load_and_read(config: PretrainConfig, folder: Path, steps: int) -> tuple[list[int], Curve]:
    trainer, source = new_trainer(config), RecordingSource()
    load_checkpoint(trainer, folder)
    curve = _steps(trainer, steps, source)
    return source.read, curve


def _read_by_all(results: Sequence[tuple[list[int], Curve]]) -> list[int]:
    return sorted(sample for read, _ in results for sample in read)


def test_trn_12_15_16_samples_after_a_resume_are_those_of_the_uninterrupted_run(tmp_path: Path) -> None:
    accumulating = {"micro_batch_size": 1, "global_batch_size": 8}  # 8, 4 or 2 passes a step
    for dp in (1, 2, 4):
        config = tiny_config("gpt2", (1, 1, dp), **accumulating)
        found = run_on_ranks(dp, _save_and_read, config, tmp_path / str(dp), 5, 5)
        assert _read_by_all(found) == list(range(40, 80))
    for before, after in ((1, 1), (4, 2), (2, 4)):
        folder = tmp_path / str(before) / "step-00000005"
        found = run_on_ranks(after, _load_and_read, tiny_config("gpt2", (1, 1, after), **accumulating), folder, 5)
        assert _read_by_all(found) == list(range(40, 80))


def test_trn_17_a_growing_batch_goes_on_growing_from_where_it_was(tmp_path: Path) -> None:
    config = tiny_config("gpt2", rampup_batch_size=(2, 2, 40), micro_batch_size=1, train_steps=14)

    whole = run_on_ranks(1, _batches, config, None, tmp_path)[0]
    resumed = run_on_ranks(1, _batches, config, tmp_path / "step-00000005", tmp_path)[0]

    assert whole[:5] == [2, 2, 2, 2, 2] and whole[-1] == 8  # step 5 ends at sample 10 of 40
    assert resumed == whole[5:]


def _batches(config: PretrainConfig, folder: Path | None, root: Path) -> list[int]:
    trainer, found = new_trainer(config), []
    if folder is not None:
        load_checkpoint(trainer, folder)
    while trainer.step < config.train_steps:
        found.append(trainer.train_step(PatternSource()).batch_samples)
        if trainer.step == 5:
            save_checkpoint(trainer, root, keep_last=1)
    return found


def _phase_two(config: PretrainConfig, root: Path, lr: float) -> list[float]:
    first = new_trainer(config)
    _steps(first, 3)
    folder = save_checkpoint(first, root, keep_last=1)
    optimizer = config.optimizer.model_copy(update={"lr": lr, "min_lr": lr})
    second = new_trainer(config.model_copy(update={"optimizer": optimizer}))
    load_initial(second, folder, InitialConfig(optimizer=True))
    return [second.train_step(PatternSource()).learning_rate for _ in range(2)]


def test_trn_19_a_new_schedule_has_its_own_learning_rate(tmp_path: Path) -> None:
    constant = {"lr": 6e-4, "min_lr": 6e-4, "warmup_steps": 0, "schedule": "constant"}

    assert run_on_ranks(1, _phase_two, tiny_config("gpt2", optimizer=constant), tmp_path, 6e-5)[0] == [6e-5, 6e-5]


def test_trn_21_weight_decay_after_a_resume_is_that_of_its_step() -> None:
    growing = {"weight_decay": 0.01, "end_weight_decay": 0.1, "lr": 1e-3, "warmup_steps": 0}
    schedule = tiny_config("gpt2", optimizer=growing, train_steps=100).schedule

    # It is a function of the step alone, so that nothing has to be restored.
    assert schedule.weight_decay(51) == pytest.approx(0.01 + 0.09 * 0.51)


def _whole_state(trainer: Trainer) -> dict[str, Tensor]:
    tensors = state_tensors(trainer.parameters, trainer.mesh, trainer.optimizer)
    return {name: tensor.to_local().clone() for name, tensor in tensors.items()}  # type: ignore[attr-defined]


def _five_and_five(config: PretrainConfig, root: Path) -> tuple[Curve, Curve, list[str]]:
    whole = new_trainer(config)
    _steps(whole, 5)
    folder = save_checkpoint(whole, root, keep_last=1)
    resumed = new_trainer(config)
    load_checkpoint(resumed, folder)
    curves = _steps(whole, 5), _steps(resumed, 5)
    states = _whole_state(whole), _whole_state(resumed)
    return (*curves, [name for name in states[0] if not torch.equal(states[0][name], states[1][name])])


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_trn_24_a_resumed_run_is_bit_equal_with_dropout_and_optimizer(precision: str, tmp_path: Path) -> None:
    config = tiny_config("gpt2", (2, 1, 2), model={"dropout": 0.1}, precision=precision)

    whole, resumed, differing = run_on_ranks(4, _five_and_five, config, tmp_path)[0]

    assert whole == resumed
    assert differing == []


def test_trn_25_recomputation_drops_the_same_elements() -> None:
    found = []
    for recompute in ("none", "selective", "full"):
        config = tiny_config("gpt2", model={"dropout": 0.3}, recompute=recompute, precision="float32")
        found.append(run_on_ranks(1, _gradients, config)[0])

    for other in found[1:]:
        assert all(torch.equal(other[name], gradient) for name, gradient in found[0].items())


def _validations(config: PretrainConfig) -> list[float]:
    trainer = new_trainer(config)
    return [validation_loss(trainer, PatternSource(), 16) for _ in range(5)]


def test_trn_27_every_validation_pass_takes_the_same_rows() -> None:
    losses = run_on_ranks(1, _validations, tiny_config("gpt2", valid_batches=2))[0]

    assert len(set(losses)) == 1


# --- numbers that are no numbers, and states that are not there yet --------------------------------------------------


def _poisoned(config: PretrainConfig, root: Path) -> tuple[str, int]:
    trainer = new_trainer(config)
    _steps(trainer, 4)
    save_checkpoint(trainer, root, keep_last=1)
    if torch.distributed.get_rank() == 1:
        trainer.parameters[3].value.view(-1)[0] = float("inf")
    try:
        trainer.train_step(PatternSource())
    except ShardlineError as error:
        return str(error), trainer.step
    return "", trainer.step


def test_trn_28_an_infinite_weight_stops_the_run_by_step_rank_and_name(tmp_path: Path) -> None:
    message, step = run_on_ranks(2, _poisoned, tiny_config("gpt2", (1, 1, 2)), tmp_path)[0]

    assert message.startswith("Step 5:") and "rank 1" in message and "The last checkpoint stays." in message
    assert step == 4 and (tmp_path / "step-00000004").is_dir()


def _before_the_first_update(config: PretrainConfig, root: Path) -> tuple[Curve, Curve, int]:
    trainer = new_trainer(config)
    folder = save_checkpoint(trainer, root, keep_last=3)
    again = new_trainer(config)
    load_checkpoint(again, folder)
    assert np.array_equal(_steps(trainer, 2), _steps(again, 2), equal_nan=True)
    folder = save_checkpoint(trainer, root, keep_last=3)
    skipped = trainer.updates
    load_checkpoint(again, folder)
    return _steps(trainer, 2), _steps(again, 2), skipped


def test_trn_30_a_run_saved_before_its_first_update_goes_on(tmp_path: Path) -> None:
    # A loss scale far too high: the first steps overflow and make no update.
    scale = {"initial": 2.0**60}
    config = tiny_config("gpt2", precision="fp16", loss_scale=scale)

    whole, resumed, updates = run_on_ranks(1, _before_the_first_update, config, tmp_path)[0]

    assert updates == 0
    assert np.array_equal(whole, resumed, equal_nan=True)
