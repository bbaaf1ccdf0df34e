"""What the device can do and what the process holds: the matmul peak, and memory."""

import resource
import time

import torch

_SECONDS = 0.2


def matmul_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the rate of large matrix products on this rank's device and threads, in FLOP/s.

    Takes about a third of a second; the best of the products counts.
    """
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    torch.mm(a, b)
    _wait(device)
    deadline = time.perf_counter() + _SECONDS
    while time.perf_counter() < deadline:
        started = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this rank has held: on the device, or of the process on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
