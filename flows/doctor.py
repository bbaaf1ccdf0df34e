"""What this machine can do, and what stands in the way."""

import importlib.util
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flows.servers import running

Verdict = Literal["ok", "note", "missing"]
NEEDED = ("torch", "numpy", "tokenizers", "pyarrow", "zstandard", "safetensors", "mlflow", "prefect", "matplotlib")
OPTIONAL = {
    "transformer_engine": "fused layers and fp8 on GPUs (extra te)",
    "lm_eval": "tasks of lm-evaluation-harness (extra harness)",
    "gigatoken": "tokenizing at twenty times the speed (extra gigatoken, or engines for all)",
    "transformers": "logit comparison of Hugging Face exports (extra dev)",
}


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, whether it is well, and what was seen."""

    name: str
    verdict: Verdict
    detail: str


def examine(store: Path) -> list[Check]:
    """Look at the machine and the store; imports torch only to ask for devices."""
    return [
        _python(),
        *_packages(),
        _cores(),
        _memory(),
        _disk(store),
        _devices(),
        *_ports(store),
        _telemetry(),
    ]


def _python() -> Check:
    is_new = sys.version_info >= (3, 11)
    return Check("python", "ok" if is_new else "missing", f"{sys.version.split()[0]} (3.11 or newer is needed)")


def _packages() -> list[Check]:
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    text = f"not installed: {', '.join(absent)}. Run make install" if absent else "all of the needed ones are installed"
    checks = [Check("packages", "missing" if absent else "ok", text)]
    for name, purpose in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            checks.append(Check(name, "note", f"not installed; it is for {purpose}"))
    return checks


def _cores() -> Check:
    return Check("cores", "ok", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable")


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Check("memory", "ok" if total >= 4 else "note", f"{total:.1f} GiB; the demo needs about 4")


def _disk(store: Path) -> Check:
    place = store.resolve()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return Check("store", "missing", f"{store.resolve()} cannot be written. Give another --store")
    free = shutil.disk_usage(place).free / 2**30
    return Check("store", "ok" if free >= 2 else "note", f"{store.resolve()}: {free:.1f} GiB free")


def _devices() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("devices", "missing", "torch is not installed")
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        return Check("devices", "ok", f"{len(names)} x {names[0]}; NCCL: {torch.distributed.is_nccl_available()}")
    return Check("devices", "note", "no CUDA device; ranks run on CPU cores over gloo")


def _ports(store: Path) -> list[Check]:
    if (servers := running(store)) is not None:
        return [Check("servers", "ok", f"running: {servers.prefect_url}, {servers.mlflow_url}")]
    checks = []
    for name, port in (("Prefect", 4200), ("MLflow", 5000)):
        with socket.socket() as probe:
            is_free = probe.connect_ex(("127.0.0.1", port)) != 0
        flag = f"--{name.lower()}-port"
        detail = f"port {port} for {name} is free" if is_free else f"port {port} is taken; give shardline up {flag}"
        checks.append(Check("ports", "ok" if is_free else "note", detail))
    return checks


def _telemetry() -> Check:
    return Check("telemetry", "ok", "switched off for Prefect, MLflow and Hugging Face by every shardline command")
