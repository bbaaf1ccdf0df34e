"""How tensors are cut for ranks, and how rows of fused tensors correspond."""

import itertools

import pytest
import torch
from conversion_cases import random_model

from conversion.huggingface_architecture import architecture_of
from conversion.huggingface_names import links_of
from conversion.rank_shards import shards_by_rank
from training.config import LayoutConfig
from training.parameters import stored_parameters


def covered(model, layout, has_optimizer=False):
    counts = {name: torch.zeros(shape) for name, (shape, _) in stored_parameters(model).items()}
    if has_optimizer:
        for name in list(counts):
            counts |= {f"optim.{name}.{m}": torch.zeros_like(counts[name]) for m in ("exp_avg", "exp_avg_sq")}
    for shards in shards_by_rank(model, layout, has_optimizer=has_optimizer):
        for shard in shards:
            counts[shard.name][tuple(slice(a, b) for a, b in shard.box)] += 1
    return counts


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("shard", ["optimizer", "none"])
@pytest.mark.parametrize("degrees", list(itertools.product((1, 2), (1, 2), (1, 2, 4))))
def test_every_element_is_written_by_exactly_one_rank(family, shard, degrees):
    tp, pp, dp = degrees
    layout = LayoutConfig(tensor_parallel=tp, pipeline_parallel=pp, data_parallel=dp, shard=shard)

    counts = covered(random_model(family), layout, has_optimizer=True)

    assert all(bool((count == 1).all()) for count in counts.values())


def test_tensors_with_fewer_rows_than_ranks_leave_some_ranks_without_a_piece():
    model = random_model("gpt2", max_position_embeddings=5)

    counts = covered(model, LayoutConfig(data_parallel=4))

    assert bool((counts["embedding.position.weight"] == 1).all())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {}),
        ("gpt2", {"tied_embeddings": False}),
        ("llama", {"num_query_groups": 1}),
        ("llama", {"num_query_groups": 4}),
        ("llama", {"qkv_bias": True, "tied_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
        ("neox", {}),
        ("mixtral", {}),
        ("qwen2", {"moe": {"shared_ffn_hidden_size": 48}}),
    ],
)
def test_links_use_every_row_of_either_side_once(family, changes):
    model = random_model(family, **changes)
    links = links_of(model, architecture_of(model))
    ours = {name: torch.zeros(shape[0]) for name, (shape, _) in stored_parameters(model).items()}
    theirs = {x.foreign: torch.zeros(x.foreign_shape[1 if x.is_transposed else 0]) for x in links}

    for link in links:
        for run in link.runs:
            ours[link.canonical][run.canonical : run.canonical + run.count] += 1
            theirs[link.foreign][run.foreign : run.foreign + run.count] += 1

    assert all(bool((rows == 1).all()) for rows in theirs.values())
    for name, rows in ours.items():
        real = model.vocab_size if name in ("embedding.word.weight", "output.weight") else len(rows)
        assert bool((rows[:real] == 1).all()) and bool((rows[real:] == 0).all())
