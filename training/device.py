"""Chooses between CUDA and the CPU, on a rank: only there torch says what this machine can do."""

import os

from contracts.errors import ConfigError
from training.config import DeviceSetting


def choose_device(setting: DeviceSetting, ranks: int) -> tuple[str, str | None]:
    """Return the kind of device that the ranks of this machine compute on: "cpu" or "cuda".

    Args:
        setting: `auto` takes CUDA where every rank has a device of its own.
        ranks: Ranks on this machine.

    Returns:
        The kind, and a line for the user where `auto` leaves devices idle.

    Raises:
        ConfigError: CUDA is asked for, and there are fewer devices than ranks.
    """
    if setting == "cpu":
        return "cpu", None
    devices = _cuda_devices()
    if devices >= ranks:
        return "cuda", None
    has = f"this machine has {devices} usable CUDA device{'s'[: devices != 1]}"
    needs = f"the layout needs {ranks} rank{'s'[: ranks != 1]}, each with a device of its own"
    if setting == "cuda":
        raise ConfigError(f"device is cuda, and {needs}, but {has}. Lower a degree of the layout, or set device: cpu.")
    if devices == 0:
        return "cpu", None
    return "cpu", f"device: auto takes the CPU, since {needs}, and {has}"


def ranks_here(world_size: int) -> int:
    """Return the number of ranks on this machine, which the launcher tells each of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))


def _cuda_devices() -> int:
    """Count the devices that this build of torch can use; 0 without a driver, or with a CPU build."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
