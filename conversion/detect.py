"""Tells the format of a checkpoint by what lies in its folder; light: imports no torch."""

import re
from pathlib import Path

from training.step_folders import TRACKER, is_native, list_checkpoints

# Formats that can be read; the others are recognized, so that a message can say what they are.
READABLE = ("native", "huggingface", "megatron", "mcore_dist", "dcp")
NAMES = {
    "native": "Shardline's own checkpoint",
    "huggingface": "Hugging Face model folder",
    "megatron": "Megatron-LM checkpoint (mp_rank_* files)",
    "mcore_dist": "Megatron-Core distributed checkpoint (torch_dist)",
    "dcp": "plain torch.distributed.checkpoint folder",
    "deepspeed": "DeepSpeed or GPT-NeoX checkpoint",
}


def format_of(path: Path) -> str | None:
    """Return "native", "huggingface", "megatron", "mcore_dist", "dcp" or "deepspeed"; None is no checkpoint."""
    try:
        if not path.is_dir():
            return None
        return _of_one(path) or _of_tree(path)
    except OSError:
        return None


def _of_one(folder: Path) -> str | None:
    """Format of a folder that holds one checkpoint itself."""
    if is_native(folder):
        return "native"
    if (folder / "model.safetensors.index.json").is_file() or (folder / "model.safetensors").is_file():
        return "huggingface"
    if any(folder.glob("shard-*.safetensors")):
        return "dcp"
    if (folder / "config.json").is_file() and any(
        any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.safetensors.index.json", "*.bin")
    ):
        return "huggingface"
    if any(folder.glob("mp_rank_*/model_optim_rng.pt")) or (folder / "model_optim_rng.pt").is_file():
        return "megatron"
    if any(folder.glob("*model_states.pt")):
        return "deepspeed"
    has_metadata, has_data = (folder / ".metadata").is_file(), any(folder.glob("*.distcp"))
    if (folder / "metadata.json").is_file() or (has_data and (folder / "common.pt").is_file()):
        return "mcore_dist"
    if re.fullmatch(r"step-\d{8}", folder.name) and has_data:
        return "native"  # a save that did not finish
    return "dcp" if has_metadata or has_data else None


def _of_tree(folder: Path) -> str | None:
    """Format of the newest checkpoint in a folder of several."""
    found = [_of_one(item.path) or _by_name(item.path) for item in list_checkpoints(folder)]
    if known := [item for item in found if item is not None]:
        return known[0]
    if (folder / "latest").is_file() and any(folder.glob("global_step*")):
        return "deepspeed"
    return "megatron" if (folder / TRACKER).is_file() else None


def _by_name(folder: Path) -> str | None:
    if re.fullmatch(r"step-\d{8}", folder.name):
        return "native"
    return "megatron" if folder.name.startswith("iter_") and any(folder.glob("mp_rank_*")) else None
