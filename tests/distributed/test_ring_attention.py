"""Attention round a ring of ranks is attention: outputs and gradients, whatever is seen."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import Tensor

from training.attention_kernels import attend, attend_backward
from training.context_parallel import ContextParallel
from training.ring_attention import RingAttention, _Plan

LENGTH, ROWS, HEADS, GROUPS, WIDTH = 24, 2, 4, 2, 8
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window of 1": {"window": 1},
    "window within a chunk": {"window": 2},
    "window over chunks": {"window": 9},
    "window longer than the row": {"window": 40},
    "documents": {"documents": True},
    "documents and window": {"documents": True, "window": 5},
    "both directions": {"causal": False},
    "both directions, documents": {"causal": False, "documents": True},
}


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, WIDTH), (HEADS * WIDTH,))
    tensors = [torch.randn(LENGTH, ROWS, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    documents = torch.tensor([[0] * 5 + [1] * 12 + [2] * 7, [7] * 23 + [8]])
    return [x.to(dtype) for x in tensors], documents


def _expected(case: dict[str, Any]) -> list[Tensor]:
    """By plain products in one process: output and gradients of queries, keys and values."""
    (q, k, v, grad), documents = _inputs()
    for x in (q, k, v):
        x.requires_grad_()
    repeated = [x.repeat_interleave(HEADS // GROUPS, dim=2).permute(1, 2, 0, 3) for x in (k, v)]
    place = torch.arange(LENGTH)
    distance = place[:, None] - place
    seen = distance < case.get("window", LENGTH)
    if case.get("causal", True):
        seen &= distance >= 0
    seen = seen.expand(ROWS, 1, LENGTH, LENGTH)
    if case.get("documents"):
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = q.permute(1, 2, 0, 3) @ repeated[0].mT / WIDTH**0.5
    out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ repeated[1]
    out = out.permute(2, 0, 1, 3).flatten(2)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def _ring(cases: list[dict[str, Any]], dtype: torch.dtype) -> list[list[Tensor]]:
    context = ContextParallel(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    found = []
    for case in cases:
        whole, documents = _inputs(dtype)
        q, k, v, grad = (context.cut(x, 0) for x in whole)
        for x in (q, k, v):
            x.requires_grad_()
        ring = RingAttention(context, case.get("window"), causal=case.get("causal", True))
        out = ring(q, k, v, documents if case.get("documents") else None)
        out.backward(grad)
        parts = [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]
        found.append([context.gather(x, 0) for x in parts])
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_outputs_and_gradients_are_those_of_one_process(size: int) -> None:
    for found in run_on_ranks(size, _ring, list(CASES.values()), torch.float64):
        for (name, case), parts in zip(CASES.items(), found, strict=True):
            for part, expected in zip(parts, _expected(case), strict=True):
                assert torch.allclose(part, expected, rtol=0, atol=1e-13), name


def test_sixteen_bits_stay_near() -> None:
    for found in run_on_ranks(2, _ring, list(CASES.values()), torch.bfloat16):
        for (name, case), parts in zip(CASES.items(), found, strict=True):
            for part, expected in zip(parts, _expected(case), strict=True):
                assert (part.double() - expected).abs().max() < 0.03 * max(1.0, float(expected.abs().max())), name


@pytest.mark.parametrize("name", ["causal", "window within a chunk", "documents and window"])
def test_masks_and_scores_are_made_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.ring_attention._PIECE", 100)
    monkeypatch.setattr("training.ring_attention._MIN_ROWS", 3)
    for fused in (True, False):
        for module in ("ring_attention", "attention_kernels"):
            monkeypatch.setattr(f"training.{module}.is_fused", lambda *_, is_so=fused, **__: is_so)
        for part, expected in zip(_ring_alone(CASES[name]), _expected(CASES[name]), strict=True):
            assert torch.allclose(part, expected, rtol=0, atol=1e-13)


def _ring_alone(case: dict[str, Any]) -> list[Tensor]:
    (q, k, v, grad), documents = _inputs()
    for x in (q, k, v):
        x.requires_grad_()
    out = RingAttention(ContextParallel(), case.get("window"))(q, k, v, documents if "documents" in case else None)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def test_a_query_that_sees_nothing_adds_nothing() -> None:
    (q, k, v, _), _ = _inputs()
    qkv = tuple(x.permute(1, 2, 0, 3) for x in (q, k, v))
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask[:, :, 3] = False

    out, log_sum = attend(*qkv, mask, is_causal=False)
    grads = attend_backward(torch.ones_like(out), qkv, out, log_sum.nan_to_num(neginf=0.0), mask, is_causal=False)

    assert bool((out[:, :, 3] == 0).all()) and bool((log_sum[:, :, 3] == float("-inf")).all())
    assert bool((grads[0][:, :, 3] == 0).all()) and all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_same_work(size: int) -> None:
    length = 16  # of a rank
    for turn in range(size):
        work = set()
        for rank in range(size):
            plan = _Plan(ContextParallel(None, rank, size), None, True)
            tiles = plan.tiles(plan.source(turn), length)
            sizes = [(t.queries.stop - t.queries.start) * (t.keys.stop - t.keys.start) for t in tiles]
            work.add(sum(sizes))
        assert len(work) == 1


def test_a_window_skips_chunks_that_are_out_of_sight() -> None:
    plan = _Plan(ContextParallel(None, 0, 4), 5, True)

    met = [source for source in range(4) if plan.tiles(source, 16)]

    assert met == [0, 1]  # chunk 0 sees itself; chunk 7 sees itself and the end of chunk 6, which rank 1 has


def test_a_window_takes_work_in_proportion_to_its_width() -> None:
    plan, length = _Plan(ContextParallel(), 128, True), 2048
    queries = torch.empty(1, 1, length, 8)
    pieces = [piece for tile in plan.tiles(0, length) for piece in plan.pieces(tile, 0, queries, None)]

    elements = sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys, _, _ in pieces)

    assert elements <= 2 * 128 * length


def test_a_length_that_makes_no_equal_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="10 tokens does not make 4 equal chunks"):
        ContextParallel(None, 0, 2).cut(torch.arange(10), 0)


def test_a_part_knows_its_places_in_the_sequence() -> None:
    context = ContextParallel(None, 1, 2)

    assert context.places(8, torch.device("cpu")).tolist() == [2, 3, 4, 5]
    assert context.places(8, torch.device("cpu"), rank=0).tolist() == [0, 1, 6, 7]
