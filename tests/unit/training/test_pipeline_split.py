"""How layers are dealt to pipeline stages."""

import itertools

import pytest
from training_cases import tiny_config

from training.config import LayoutConfig, PretrainConfig
from training.estimate import estimate
from training.pipeline_split import balanced_split, layers_of_stages, rank_of_stage, stage_costs, stages_of_rank

Sizes = tuple[int, ...]


def _worst(layers: list[int], embedding: int, head: int, sizes: Sizes) -> int:
    ends = list(itertools.accumulate(sizes, initial=0))
    costs = [sum(layers[a:b]) for a, b in itertools.pairwise(ends)]
    costs[0] += embedding
    costs[-1] += head
    return max(costs)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("head", [0, 3, 20])
@pytest.mark.parametrize("layers", [[5] * 7, [1, 9, 1, 9, 1, 9], [30, 1, 1, 1, 1]])
def test_no_split_has_a_cheaper_costliest_stage_than_the_balanced_one(
    layers: list[int], head: int, num_stages: int
) -> None:
    found = balanced_split(layers, 2, head, num_stages)

    every = itertools.product(range(1, len(layers) + 1), repeat=num_stages - 1)
    legal = [(*sizes, len(layers) - sum(sizes)) for sizes in every if sum(sizes) <= len(layers)]
    assert found in legal
    assert _worst(layers, 2, head, found) == min(_worst(layers, 2, head, sizes) for sizes in legal)


def test_a_large_vocabulary_leaves_the_last_stage_fewer_layers() -> None:
    model = tiny_config("gpt2", model={"num_layers": 24, "hidden_size": 1024, "vocab_size": 50257}).model

    found = layers_of_stages(model, LayoutConfig(pipeline_parallel=4, pipeline_split="balanced"))

    assert [len(layers) for layers in found] == [7, 7, 7, 3]
    assert [layer for layers in found for layer in layers] == list(range(24))
    layers, embedding, head = stage_costs(model)
    assert layers == [12 * 1024 * 1024] * 24
    assert (embedding, head) == (1024, 1024 * 50304)


def test_a_given_split_is_followed_by_the_estimate() -> None:
    model = {"num_layers": 6, "tied_embeddings": False, "vocab_size": 1000}
    needs = {}
    for split in ("even", (6, 0), (5, 1)):
        config = tiny_config("gpt2", (1, 2, 1), model=model, layout_more={"pipeline_split": split})
        needs[split] = estimate(config).parameters_per_rank

    assert needs[5, 1] - needs["even"] == 2 * (needs[6, 0] - needs[5, 1])


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ([3, 2], "pipeline_split [3, 2] has 2 numbers, and pipeline_parallel (3) makes 3 stages. Give 3 numbers"),
        ([3, 0, 3], "pipeline_split [3, 0, 3]: stage 2 has no layer"),
        ([3, 2, 2], "layout.pipeline_split [3, 2, 2] deals 7 layers, and model.num_layers is 6"),
        ("evenly", "pipeline_split"),
    ],
)
def test_a_split_that_does_not_fit_is_refused_with_the_arithmetic(split: object, message: str) -> None:
    layout = {"pipeline_parallel": 3, "pipeline_split": split}
    with pytest.raises(ValueError, match="pipeline_split") as error:
        PretrainConfig.model_validate({"model": {"num_layers": 6}, "layout": layout})

    assert message in str(error.value)


def test_the_first_and_the_last_stage_may_have_no_layer() -> None:
    layout = LayoutConfig(pipeline_parallel=3, pipeline_split=(0, 6, 0))

    assert layers_of_stages(tiny_config("gpt2", model={"num_layers": 6}).model, layout) == (
        range(0),
        range(6),
        range(6, 6),
    )


def test_virtual_stages_go_round_the_ranks() -> None:
    layout = LayoutConfig(pipeline_parallel=2, virtual_pipeline=3)

    assert [list(stages_of_rank(layout, rank)) for rank in (0, 1)] == [[0, 2, 4], [1, 3, 5]]
    assert [rank_of_stage(layout, stage) for stage in range(6)] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"global_batch_size": 9},
            "gives 9 micro-batches; with layout.virtual_pipeline (2) they go through 4 ranks in 2 equal rounds",
        ),
        (
            {"global_batch_size": 11},
            "11 / 2 leaves a remainder. Use global_batch_size 10 or 12, or virtual_pipeline: 1",
        ),
        ({"global_batch_size": 3}, "layout.pipeline_parallel (4) needs at least 4. Use global_batch_size 4"),
        (
            {"model": {"num_layers": 7}},
            "model.num_layers (7) is below layout.pipeline_parallel (4) x virtual_pipeline (2), and every stage "
            "needs a layer. Use virtual_pipeline 1 or less",
        ),
        (
            {"layout_more": {"pipeline_split": [4, 2, 1, 1]}},
            "has 4 numbers, and pipeline_parallel (4) x virtual_pipeline (2) makes 8 stages. Give 8 numbers",
        ),
        ({"rampup_batch_size": [4, 1, 100], "global_batch_size": 10}, "the batch of rampup_batch_size (9)"),
    ],
)
def test_an_interleaved_pipeline_that_cannot_run_is_refused_with_the_nearest_that_can(
    changes: dict[str, object], message: str
) -> None:
    layout = {"virtual_pipeline": 2, **changes.pop("layout_more", {})}  # type: ignore[dict-item]
    settings = {"micro_batch_size": 1, "model": {"num_layers": 8}, **changes}

    with pytest.raises(ValueError, match=r"pipeline") as error:
        tiny_config("gpt2", (1, 4, 1), layout_more=layout, **settings).check_batches_after(0)

    assert message in str(error.value)


def test_interleaving_shortens_the_bubble_and_keeps_more_activations() -> None:
    plain = estimate(tiny_config("gpt2", (1, 2, 1), model={"num_layers": 8}, micro_batch_size=1))
    layout = {"virtual_pipeline": 2}
    interleaved = estimate(
        tiny_config("gpt2", (1, 2, 1), model={"num_layers": 8}, micro_batch_size=1, layout_more=layout)
    )

    assert plain.bubble == pytest.approx(1 / 9)
    assert interleaved.bubble == pytest.approx(1 / 17)
    # Rank 0 keeps five halves of its layers (4 of 8) instead of two wholes; a block's own backward comes on top.
    assert interleaved.activations_bytes / plain.activations_bytes == pytest.approx(5 / 4, rel=0.01)
    assert interleaved.parameters_per_rank == plain.parameters_per_rank


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout_more": {"schedule": "zbv", "virtual_pipeline": 4}}, "zbv has two stages on each rank, not virtual"),
        ({"layout_more": {"schedule": "zero_bubble"}, "global_batch_size": 11}, "or schedule: 1f1b"),
        ({"layout_more": {"schedule": "zbv"}, "recompute": "selective"}, "recompute: selective allows one"),
        ({"layout_more": {"schedule": "zero_bubble"}, "compile": True}, "compile: true allows one"),
        (
            {"layout_more": {"schedule": "zbv"}, "model": {"num_layers": 7}},
            "below layout.pipeline_parallel (4) x 2 (schedule: zbv), and every stage needs a layer. Use "
            "schedule: zero_bubble",
        ),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_with_one_that_can(changes: dict[str, object], message: str) -> None:
    settings = {"micro_batch_size": 1, "model": {"num_layers": 8}, **changes}

    with pytest.raises(ValueError, match=r"schedule") as error:
        tiny_config("gpt2", (1, 4, 1), **settings)

    assert message in str(error.value)


def test_a_schedule_without_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match="Use pipeline_parallel: 2 or more, or leave schedule out"):
        tiny_config("gpt2", layout_more={"schedule": "zbv"})


def test_t5_goes_backward_in_one() -> None:
    with pytest.raises(ValueError, match="share one table of relative positions"):
        tiny_config("t5", (1, 2, 1), layout_more={"schedule": "zero_bubble"}, decoder_seq_length=16)


@pytest.mark.parametrize(
    ("schedule", "passes", "expected"),
    [
        ("1f1b", 8, 9 / 33),
        ("zero_bubble", 8, 3 / 27),
        ("zbv", 8, 3 / 51),
        ("zbv", 5, 4 / 34),
        ("zbv", 4, 6 / 30),
    ],
)
def test_half_backward_passes_shorten_the_bubble(schedule: str, passes: int, expected: float) -> None:
    """Lengths of torch's own orders, played through with passes of equal length."""
    config = tiny_config(
        "gpt2",
        (1, 4, 1),
        model={"num_layers": 8},
        micro_batch_size=1,
        global_batch_size=passes,
        layout_more={"schedule": schedule},
    )

    assert estimate(config).bubble == pytest.approx(expected)


def test_the_ranks_of_a_v_have_the_first_stages_forth_and_the_last_back() -> None:
    layout = tiny_config("gpt2", (1, 4, 1), model={"num_layers": 8}, layout_more={"schedule": "zbv"}).layout

    assert [stages_of_rank(layout, rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [rank_of_stage(layout, stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
