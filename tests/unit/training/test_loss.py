"""The fused output projection and loss against the plain formulas."""

import pytest
import torch
import torch.nn.functional as F

from training.config import IGNORE_INDEX
from training.loss import output_loss, token_log_probs
from training.mesh import TensorParallel

ONE = TensorParallel(None, 0, 1, False)


def _case(vocab_size: int = 37, rows: int = 40, tokens: tuple[int, int] = (3, 150)) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens[1], tokens[0], 16, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(rows, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, vocab_size, tokens, generator=generator)
    labels[0, :5] = IGNORE_INDEX
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [1, 64, 10_000])
def test_loss_and_gradients_equal_cross_entropy(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.loss.CPU_CHUNK_LOGITS", 1)
    monkeypatch.setattr("training.loss.MIN_CHUNK_TOKENS", chunk)
    hidden, weight, labels = _case()
    logits = (hidden @ weight[:37].t()).transpose(0, 1)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
    wanted = torch.autograd.grad(expected * 0.25, (hidden, weight))

    loss = output_loss(hidden, weight, labels, vocab_size=37, tp=ONE)
    found = torch.autograd.grad(loss * 0.25, (hidden, weight))

    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_padding_rows_take_no_part() -> None:
    hidden, weight, labels = _case()
    with torch.no_grad():
        weight[37:] = 1e6

    loss = output_loss(hidden, weight, labels, vocab_size=37, tp=ONE)
    (gradient,) = torch.autograd.grad(loss, weight)

    assert torch.isfinite(loss)
    assert not gradient[37:].any()


def test_bf16_logits_are_reduced_in_float32() -> None:
    hidden, weight, labels = _case()
    small, table = hidden.detach().bfloat16(), weight.detach().bfloat16()
    expected = F.cross_entropy(
        (small @ table[:37].t()).float().transpose(0, 1).flatten(0, 1), labels.flatten(), reduction="sum"
    )

    loss = output_loss(small, table, labels, vocab_size=37, tp=ONE)

    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_log_probs_of_targets_and_whether_they_are_greedy() -> None:
    hidden, weight, labels = _case()
    logits = (hidden @ weight[:37].t()).transpose(0, 1)
    expected = logits.log_softmax(-1).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    counts = labels != IGNORE_INDEX

    log_probs, is_greedy = token_log_probs(hidden, weight, labels, vocab_size=37, tp=ONE)

    torch.testing.assert_close(log_probs, torch.where(counts, expected, 0.0), rtol=1e-12, atol=1e-13)
    assert torch.equal(is_greedy, counts & (logits.argmax(-1) == labels))


def test_the_z_loss_enters_the_gradient_and_not_the_value() -> None:
    hidden, weight, labels = _case()
    logits = (hidden @ weight[:37].t()).transpose(0, 1).flatten(0, 1)
    counts = labels.flatten() != IGNORE_INDEX
    entropy = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
    z_loss = 0.03 * (logits.logsumexp(-1).square() * counts).sum()
    wanted = torch.autograd.grad(entropy + z_loss, (hidden, weight))

    loss = output_loss(hidden, weight, labels, vocab_size=37, tp=ONE, z_loss=0.03)
    found = torch.autograd.grad(loss, (hidden, weight))

    torch.testing.assert_close(loss, entropy, rtol=1e-13, atol=0)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("skips", [False, True])
def test_a_bias_of_the_logits_has_its_gradient_and_ignored_tokens_need_no_logits(skips: bool) -> None:
    hidden, weight, labels = _case()
    bias = torch.linspace(-1, 1, 40, dtype=torch.float64, requires_grad=True)
    labels[:, ::2] = IGNORE_INDEX
    logits = F.linear(hidden, weight[:37], bias[:37]).transpose(0, 1)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
    wanted = torch.autograd.grad(expected, (hidden, weight, bias))

    loss = output_loss(hidden, weight, labels, vocab_size=37, tp=ONE, bias=bias, skips_ignored=skips)
    found = torch.autograd.grad(loss, (hidden, weight, bias))
    log_probs, _ = token_log_probs(hidden, weight, labels, vocab_size=37, tp=ONE, bias=bias)

    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(-log_probs.sum(), expected.detach(), rtol=1e-12, atol=0)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_rows_of_which_nothing_is_to_be_said_have_no_loss() -> None:
    hidden, weight, labels = _case()

    loss = output_loss(hidden, weight, torch.full_like(labels, IGNORE_INDEX), vocab_size=37, tp=ONE, skips_ignored=True)
    gradients = torch.autograd.grad(loss, (hidden, weight))

    assert loss == 0 and not any(gradient.any() for gradient in gradients)
