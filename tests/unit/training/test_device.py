"""Which device the ranks of a machine take."""

import pytest

from contracts.errors import ConfigError
from training import device
from training.device import choose_device, ranks_here


@pytest.fixture
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_cuda_devices", lambda: 1)


@pytest.mark.usefixtures("_one_gpu")
def test_auto_takes_cuda_only_where_every_rank_has_a_device() -> None:
    assert choose_device("auto", 1) == ("cuda", None)

    kind, note = choose_device("auto", 2)
    assert kind == "cpu"
    assert note == (
        "device: auto takes the CPU, since the layout needs 2 ranks, each with a device of its own, and this machine "
        "has 1 usable CUDA device"
    )


@pytest.mark.usefixtures("_one_gpu")
def test_asking_for_cuda_with_too_few_devices_is_an_error() -> None:
    assert choose_device("cuda", 1) == ("cuda", None)
    assert choose_device("cpu", 2) == ("cpu", None)
    with pytest.raises(ConfigError, match=r"needs 2 ranks.*has 1 usable CUDA device\. Lower a degree.*device: cpu"):
        choose_device("cuda", 2)


def test_without_devices_auto_is_the_cpu_and_needs_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_cuda_devices", lambda: 0)

    assert choose_device("auto", 2) == ("cpu", None)
    with pytest.raises(ConfigError, match="has 0 usable CUDA devices"):
        choose_device("cuda", 1)


def test_a_build_of_torch_without_cuda_has_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    assert choose_device("auto", 1) == ("cpu", None)


def test_the_launcher_says_how_many_ranks_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_here(16) == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks_here(16) == 8
