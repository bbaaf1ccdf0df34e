"""Checks a CUDA device: parity with the CPU, kernels of ring attention, Transformer Engine, and throughput.

`make gpu-check`. Says why it skips where there is no device. Throughput is of a model of about one
billion parameters, as model FLOP/s against the matmul peak measured on the same device in the same
run; the goal is 55 % at bf16 on one Hopper GPU.
"""

import argparse
import contextlib
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from contracts.errors import ConfigError
from training.config import IGNORE_INDEX, PretrainConfig
from training.context_parallel import ContextParallel
from training.flops import parameter_count, step_flops_per_token
from training.layers import CoreAttention
from training.measure import matmul_peak_flops, peak_memory_bytes
from training.mesh import build_mesh
from training.ring_attention import RingAttention
from training.rows import PADDING
from training.te import transformer_engine
from training.trainer import Trainer, full_precision_matmul

GOAL = 0.55


class RandomRows:
    """Rows of random tokens, fixed by the sample's number."""

    def __init__(self, vocab_size: int, seq_length: int) -> None:
        self.vocab_size, self.seq_length = vocab_size, seq_length

    def tokens(self, sample_ids: Any) -> Any:
        rows = [np.random.default_rng(int(n)).integers(0, self.vocab_size, self.seq_length + 1) for n in sample_ids]
        return np.stack(rows)


class RandomEncoderRows:
    """Rows of an encoder, or of an encoder and a decoder, with padding in some; fixed by the sample's number."""

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config

    def rows(self, sample_ids: Any) -> dict[str, Any]:
        rows = [self._row(np.random.default_rng(int(n)), is_short=int(n) % 2 == 0) for n in sample_ids]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, random: np.random.Generator, *, is_short: bool) -> dict[str, Any]:
        length, decoder_length = self.config.seq_length, self.config.decoder_length
        inputs, documents = random.integers(0, 1000, length), np.zeros(length, dtype=np.int64)
        documents[length - 9 :] = PADDING if is_short else 0
        if decoder_length:
            said = random.integers(0, 1000, decoder_length + 1)
            return {"inputs": inputs, "documents": documents, "decoder_inputs": said[:-1], "labels": said[1:]}
        is_said = (random.random(length) < 0.15) & (documents == 0)
        labels = np.where(is_said, random.integers(0, 1000, length), IGNORE_INDEX)
        types, pair = (np.arange(length) > length // 2).astype(np.int64), random.integers(0, 2)
        return {"inputs": inputs, "documents": documents, "labels": labels, "token_types": types, "pair_labels": pair}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each throughput run")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-check: skipped, since torch sees no CUDA device here.")
        return 0
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    full_precision_matmul(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; CUDA {torch.version.cuda}")
    failures = check_parity() + check_ring() + check_transformer_engine()
    check_throughput(options.steps, options.micro_batch_size)
    dist.destroy_process_group()
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def small_config(family: str, **changes: Any) -> PretrainConfig:
    model = {"family": family, "num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1000}
    model |= changes.pop("model", {})
    batch = {"seq_length": 128, "micro_batch_size": 4, "global_batch_size": 8, "train_steps": 10}
    return PretrainConfig.model_validate({"model": model, **batch, "optimizer": {"lr": 1e-3}, **changes})


def losses(config: PretrainConfig, device: str) -> list[float]:
    trainer = Trainer(config, build_mesh(config.layout, device))
    rows = RandomRows(1000, config.seq_length) if config.model.causal else RandomEncoderRows(config)
    return [trainer.train_step(rows).loss_nats for _ in range(config.train_steps)]


def check_parity() -> list[str]:
    """Ten steps on the device against ten on the CPU."""
    failures = []
    for family in ("gpt2", "llama", "bert", "t5"):
        reference = losses(small_config(family), "cpu")
        for precision, tolerance in (("float32", 1e-4), ("bf16", 2e-2)):
            found = losses(small_config(family, precision=precision), "cuda")
            worst = max(abs(a / b - 1) for a, b in zip(found, reference, strict=True))
            print(f"parity {family:<6} {precision:<8} against CPU float32: {worst:.1e} (at most {tolerance:g})")
            if worst > tolerance:
                failures.append(f"parity of {family} at {precision}: {worst:.1e}")
    return failures


def check_ring(device: str = "cuda") -> list[str]:
    """Kernels of ring attention, which join pieces by their denominators, against PyTorch's attention."""
    failures = []
    documents = torch.arange(2 * 96, device=device).view(2, 96) // 40
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        for window, told in ((None, None), (17, None), (None, documents)):
            results = []
            for attention in (CoreAttention(window), RingAttention(ContextParallel(), window)):
                generator = torch.Generator().manual_seed(5)
                sizes = ((96, 2, 4, 32), (96, 2, 2, 32), (96, 2, 2, 32))
                qkv = [torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in sizes]
                out = attention(*qkv, told)
                out.square().sum().backward()
                results.append([out.detach(), *(x.grad for x in qkv if x.grad is not None)])
            pairs = zip(*results, strict=True)
            worst = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs)
            what = f"ring attention {str(dtype).removeprefix('torch.')} window={window} documents={told is not None}"
            print(f"{what}: {worst:.1e} (at most {tolerance:g})")
            if not worst <= tolerance:
                failures.append(f"{what}: {worst:.1e}")
    return failures


def check_transformer_engine() -> list[str]:
    """Ten steps with Transformer Engine's layers against ten with ours, from the same weights."""
    try:
        transformer_engine()
    except ConfigError as error:
        print(f"Transformer Engine: skipped. {error}")
        return []
    failures = []
    for family in ("gpt2", "llama", "bert"):
        ours = losses(small_config(family, precision="bf16"), "cuda")
        theirs = losses(small_config(family, precision="bf16", model={"backend": "te"}), "cuda")
        worst = max(abs(a / b - 1) for a, b in zip(theirs, ours, strict=True))
        print(f"te against local, {family}, bf16: {worst:.1e} (at most 0.01)")
        if worst > 0.01:
            failures.append(f"te against local for {family}: {worst:.1e}")
        for way in (
            {"recompute": "full"},
            {"fp8": "current_scaling"},
            {"fp8": "current_scaling", "recompute": "full"},
        ):
            found = losses(small_config(family, precision="bf16", model={"backend": "te"}, **way), "cuda")
            worst = max(abs(a / b - 1) for a, b in zip(found, ours, strict=True))
            print(f"te {way} against local bf16, {family}: {worst:.1e} (at most 0.03)")
            if worst > 0.03:
                failures.append(f"te {way} against local for {family}: {worst:.1e}")
    return failures


def check_throughput(steps: int, micro_batch_size: int) -> None:
    """Tokens per second and the share of the matmul peak for each way to run the layers."""
    device = torch.device("cuda")
    peak = matmul_peak_flops(device, torch.bfloat16)
    print(f"matmul peak at bf16: {peak / 1e12:.0f} TFLOP/s")
    ways: dict[str, tuple[str, str | None]] = {"local bf16": ("local", None)}
    with contextlib.suppress(ConfigError):
        transformer_engine()
        ways |= {"te bf16": ("te", None), "te fp8": ("te", "current_scaling")}
    for name, (backend, fp8) in ways.items():
        config = large_config(backend, micro_batch_size, fp8)
        torch.cuda.reset_peak_memory_stats()
        seconds = seconds_per_step(config, steps)
        tokens = config.global_batch_size * config.seq_length
        share = step_flops_per_token(config.model, config.seq_length) * tokens / seconds / peak
        reached = "" if name != "local bf16" else f"; goal {GOAL:.0%}: {'reached' if share >= GOAL else 'MISSED'}"
        print(
            f"{name:<12} {parameter_count(config.model) / 1e9:.2f} G parameters, {tokens / seconds:,.0f} tokens/s, "
            f"{share:.1%} of the bf16 peak, {peak_memory_bytes(device) / 2**30:.0f} GiB{reached}"
        )


def large_config(backend: str, micro_batch_size: int, fp8: str | None = None) -> PretrainConfig:
    """About 1.1 G parameters, Llama-style."""
    model = {
        "family": "llama",
        "num_layers": 20,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "ffn_hidden_size": 5632,
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
        "backend": backend,
    }
    batch = {"micro_batch_size": micro_batch_size, "global_batch_size": 4 * micro_batch_size, "seq_length": 2048}
    return PretrainConfig.model_validate(
        {"model": model, **batch, "precision": "bf16", "fp8": fp8, "train_steps": 1000}
    )


def seconds_per_step(config: PretrainConfig, steps: int) -> float:
    trainer = Trainer(config, build_mesh(config.layout, "cuda"))
    rows = RandomRows(32000, config.seq_length)
    times = []
    for _ in range(steps + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        trainer.train_step(rows)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    del trainer
    torch.cuda.empty_cache()
    return statistics.median(times[3:])


if __name__ == "__main__":
    sys.exit(main())
