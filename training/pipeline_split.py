"""Which layers each pipeline stage has, and which rank has it. No torch.

Stages are numbered in the order of the layers. With virtual stages a rank has several: stages
r, r + p, r + 2p, ... of p ranks (Narayanan et al. 2021, arXiv:2104.04473, section 2.2), so that rank 0
has the first and rank p - 1 the last. In the V of `zbv` rank r has stages r and 2 p - 1 - r (Qi et al. 2023,
arXiv:2401.10241, section 6), so that rank 0 has the first and the last.
"""

from collections.abc import Sequence

from training.flops import layer_products
from training.layout_config import LayoutConfig
from training.model_config import ModelConfig


def layers_of_stages(model: ModelConfig, layout: LayoutConfig) -> tuple[range, ...]:
    """Layers of each stage, contiguous and in order, as `layout.pipeline_split` says."""
    stages, split = layout.num_stages, layout.pipeline_split
    if split == "even":
        return tuple(stage_layers(model.total_layers, stages, stage) for stage in range(stages))
    sizes = balanced_split(*stage_costs(model), stages) if split == "balanced" else split
    ends = [sum(sizes[: n + 1]) for n in range(stages)]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """Layers of one stage of an even split: earlier stages take the remainder."""
    base, extra = divmod(num_layers, num_stages)
    first = stage * base + min(stage, extra)
    return range(first, first + base + (stage < extra))


def rank_of_stage(layout: LayoutConfig, stage: int) -> int:
    """Place along the pipeline axis of the rank that has `stage`."""
    ranks = layout.pipeline_parallel
    return layout.num_stages - 1 - stage if layout.schedule == "zbv" and stage >= ranks else stage % ranks


def stages_of_rank(layout: LayoutConfig, rank: int) -> tuple[int, ...]:
    """Stages of the rank at `rank` along the pipeline axis, in their order."""
    return tuple(stage for stage in range(layout.num_stages) if rank_of_stage(layout, stage) == rank)


def stage_costs(model: ModelConfig) -> tuple[list[int], int, int]:
    """Cost of each layer, of the embedding and of the head: weights that one token meets.

    Each is a multiply-add forward and two backward; a lookup meets one row of the table. Scores of
    attention, which depend on the length of a row and are equal in all layers, are left out, so
    that a checkpoint's layout alone says where its layers are.
    """
    layers = [layer_products(model, layer) for layer in range(model.total_layers)]
    return layers, model.hidden_size, model.hidden_size * model.padded_vocab_size


def balanced_split(layers: Sequence[int], embedding: int, head: int, num_stages: int) -> tuple[int, ...]:
    """Number of layers of each stage, so that the costliest stage costs least; of equals the most even one.

    All stages but the last, which has the head, have a layer.

    Args:
        layers: Cost of each layer.
        embedding: Added to the first stage.
        head: Added to the last.
        num_stages: At most one more than there are layers.
    """
    if num_stages == 1:
        return (len(layers),)
    before = [0]
    for cost in layers:
        before.append(before[-1] + cost)
    # best[n]: (costliest, sum of squares, sizes) of the stages so far with the first n layers.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        extra = embedding * (stage == 0) + head * is_last
        found: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for done, (costliest, squares, sizes) in best.items():
            ends = [len(layers)] if is_last else range(done + 1, len(layers) + 1)
            for end in ends:
                cost = before[end] - before[done] + extra
                made = (max(costliest, cost), squares + cost * cost, (*sizes, end - done))
                if end not in found or _order(made) < _order(found[end]):
                    found[end] = made
        best = found
    return best[len(layers)][2]


def _order(candidate: tuple[int, int, tuple[int, ...]]) -> tuple[int, int, tuple[int, ...]]:
    costliest, squares, sizes = candidate
    return costliest, squares, tuple(-size for size in sizes)
