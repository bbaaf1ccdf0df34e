"""Says what a reshape would do, for --dry-run; reads descriptions and writes nothing."""

from pathlib import Path
from typing import Any

from conversion.averaging import averaged, close_all, open_sources
from conversion.config import ReshapeConfig
from conversion.huggingface_writing import HuggingFaceTarget
from conversion.megatron_writing import MegatronTarget
from conversion.rank_shards import degrees
from conversion.targets import Plan, dropped_and_kept, make_plan
from training.flops import parameter_count
from training.step_folders import step_folder_name

# Beside tensors: tables of names and places, and buffers of the copy.
_OVERHEAD_BYTES = 32 * 2**20


def describe_plan(settings: ReshapeConfig, path: Path) -> dict[str, Any]:
    """Return source, target, sizes, memory, and what is dropped.

    Raises:
        ConfigError, InputError: What a real run would refuse before it writes.
    """
    sources = open_sources(path, settings)
    try:
        source = averaged(sources[0], sources[1:])
        plan = make_plan(source, settings)
        entries = plan.source.tensors.entries
        return {
            "source": str(source.path),
            "source_format": source.format,
            "source_layout": degrees(source.info.layout),
            "step": source.info.step,
            "consumed_samples": source.info.consumed_samples,
            "source_dtype": source.info.dtype,
            "source_tensors": len(entries),
            "source_bytes": sum(entry.size_bytes for entry in entries.values()),
            "target_format": settings.to,
            **_target(plan),
            "parameters": parameter_count(plan.target.model),
            "bytes": plan.target.size_bytes,
            "peak_memory_bytes": plan.target.peak_bytes + _OVERHEAD_BYTES,
            **dropped_and_kept(plan),
        }
    finally:
        close_all(sources)


def _target(plan: Plan) -> dict[str, Any]:
    target = plan.target
    if isinstance(target, HuggingFaceTarget):
        names = {name for entries in target.files.values() for name in entries}
        dtypes = {entry.dtype for entries in target.files.values() for entry in entries.values()}
        files = list(target.files)
    elif isinstance(target, MegatronTarget):
        names = set(plan.source.tensors.entries) if target.has_optimizer else set(plan.source.info.parameters)
        dtypes = {target.dtype(name) for name in plan.source.info.parameters}
        files = target.files
    else:
        names = {shard.name for shards in target.shards for shard in shards}
        dtypes = {target.dtype(name) for name in plan.source.info.parameters}
        folder = step_folder_name(plan.source.info.step)
        files = [f"{folder}/__{rank}_0.distcp" for rank in range(len(target.shards))]
    layout = (
        {"architecture": target.architecture}
        if isinstance(target, HuggingFaceTarget)
        else {"target_layout": degrees(target.layout.model_dump())}
    )
    return {
        **layout,
        "target_dtype": "+".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
        "target_tensors": len(names),
        "files": files if len(files) <= 8 else [*files[:3], f"... {len(files) - 4} more", files[-1]],
        "num_files": len(files),
    }
