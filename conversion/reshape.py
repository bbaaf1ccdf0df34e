"""The reshape stage: read descriptions, plan, stream, verify. Imports torch; `stage` imports this when it works."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from contracts.artifact import Artifact
from contracts.errors import ConfigError, InputError, ShardlineError
from contracts.files import user_path
from contracts.store import Workspace
from conversion.averaging import averaged, close_all, open_sources
from conversion.catalogue import Checkpoint
from conversion.config import ReshapeConfig
from conversion.huggingface_files import weight_files
from conversion.huggingface_writing import HuggingFaceTarget
from conversion.logits import max_logit_difference, require_transformers
from conversion.megatron import check_megatron_files
from conversion.megatron_writing import MegatronTarget
from conversion.native import check_record_sums
from conversion.reading import open_checkpoint
from conversion.targets import Plan, dropped_and_kept, make_plan
from conversion.tokenizer_files import special_token_ids, tokenizer_files
from conversion.verification import check_source_files, compare_written
from training.flops import parameter_count, step_flops_per_token
from training.tokenizer_folder import TOKENIZER, copy_tokenizer


def reshape(settings: ReshapeConfig, inputs: Mapping[str, Artifact], workspace: Workspace) -> dict[str, Any]:
    """Write the source in another layout or format, read it back, and say what was carried over.

    Args:
        inputs: `checkpoint`, of kind checkpoint or model; else `settings.checkpoint` names a path.

    Raises:
        ConfigError: There is no such checkpoint, or it cannot be cut or written as asked.
        InputError: The source is damaged or not supported; nothing has been written then.
        ShardlineError: What was written differs from the source.
    """
    path = source_path(settings, inputs)
    sources = open_sources(path, settings)
    try:
        source = averaged(sources[0], sources[1:])
        plan = make_plan(source, settings)
        if settings.logits and {"megatron", "mcore_dist", "dcp"} & {source.format, settings.to}:
            raise ConfigError(
                "logits: true runs both models, and only native and Hugging Face ones are run here. Reshape to "
                "native first, and compare from there."
            )
        if settings.logits and "huggingface" in (source.format, settings.to):
            require_transformers()
        for line in (*plan.notes, *(f"left behind: {item}" for item in plan.dropped)):
            workspace.progress.note(line)
        files = tokenizer_files(source.path)
        if "tokenizer.json" not in files:
            workspace.progress.note(f"{source.path} carries no tokenizer.json, so the result has none either")
        with _source_check(settings, sources, workspace):
            folder = _write(plan, settings.workers, files, inputs, workspace)
        written = open_checkpoint(folder)
        summary = _summary(plan, written, path, has_tokenizer="tokenizer.json" in files)
        try:
            summary |= _checks(settings, plan, source, written, workspace)
        finally:
            written.tensors.close()
        return summary
    finally:
        close_all(sources)


def source_path(settings: ReshapeConfig, inputs: Mapping[str, Artifact]) -> Path:
    """Return the folder of the source.

    Raises:
        ConfigError: Neither an artifact nor a path is given, or both are.
    """
    if "checkpoint" in inputs and settings.checkpoint is not None:
        raise ConfigError("reshape: both a checkpoint artifact and reshape.checkpoint are given. Keep one.")
    if "checkpoint" in inputs:
        return inputs["checkpoint"].path
    if settings.checkpoint is None:
        raise ConfigError("reshape has no source. Give one with --checkpoint, or set reshape.checkpoint.")
    return user_path(settings.checkpoint)


@contextlib.contextmanager
def _source_check(settings: ReshapeConfig, sources: Sequence[Checkpoint], workspace: Workspace) -> Iterator[None]:
    """Compare the files of the sources with the digests or sums that it has, on a thread of its own, while others copy.

    Raises:
        InputError: A file is damaged; what was written is removed.
    """
    if not settings.verify:
        yield
        return
    with ThreadPoolExecutor(max_workers=1) as pool:
        check = pool.submit(_check_files, sources, workspace)
        yield
        try:
            check.result()
        except InputError:
            workspace.discard()
            raise


def _check_files(sources: Sequence[Checkpoint], workspace: Workspace) -> None:
    for source in sources:
        if source.format == "native":
            check_source_files(source.path, source.info, workspace.store.digest)
        elif source.format == "megatron":
            check_megatron_files(source.path)
        elif (source.path / ".metadata").is_file():
            check_record_sums(source.path)


def _write(
    plan: Plan, workers: int, files: Mapping[str, Path], inputs: Mapping[str, Artifact], workspace: Workspace
) -> Path:
    root = workspace.path
    if isinstance(plan.target, HuggingFaceTarget):
        token_ids = {**plan.source.info.extra.get("token_ids", {}), **special_token_ids(files)}
        digests = plan.target.write(
            root, token_ids=token_ids, progress=workspace.progress, is_resumed=workspace.is_resumed
        )
        workspace.known_digests |= digests
        copy_tokenizer(files, root)
        return root
    if isinstance(plan.target, MegatronTarget):
        if files:
            copy_tokenizer(files, root / TOKENIZER)
        return plan.target.write(root, progress=workspace.progress, workers=workers)
    extra: dict[str, Any] = {"reshaped_from": {"format": plan.source.format, "layout": dict(plan.source.info.layout)}}
    if "checkpoint" in inputs:
        extra["reshaped_from"]["fingerprint"] = inputs["checkpoint"].fingerprint
    if files:
        copy_tokenizer(files, root / TOKENIZER)
    folder = plan.target.write(
        root, extra=extra, progress=workspace.progress, workers=workers, is_resumed=workspace.is_resumed
    )
    from training.step_folders import read_info

    for name, facts in read_info(folder).files.items():
        workspace.known_digests[f"{folder.name}/{name}"] = facts["sha256"]
    return folder


def _checks(
    settings: ReshapeConfig, plan: Plan, source: Checkpoint, written: Checkpoint, workspace: Workspace
) -> dict[str, Any]:
    checks: dict[str, Any] = {}
    if settings.verify:
        try:
            checks["verified_tensors"] = compare_written(
                written, plan.source, plan.caster, progress=workspace.progress, workers=settings.workers
            )
        except ShardlineError:
            workspace.discard()  # or the next run would go on from the files that are wrong
            raise
    if settings.logits:
        checks["logits_max_difference"] = max_logit_difference(source, written)
    return checks


def _summary(plan: Plan, written: Checkpoint, path: Path, *, has_tokenizer: bool) -> dict[str, Any]:
    info, model, caster = plan.source.info, plan.target.model, plan.caster
    summary: dict[str, Any] = {
        "step": info.step,
        "consumed_samples": info.consumed_samples,
        "tokens": info.consumed_tokens,
        "parameters": parameter_count(model),
        "vocab_size": model.vocab_size,
        "seq_length": info.seq_length,
        "flops_per_token": step_flops_per_token(model, info.seq_length),
        "model": model.model_dump(mode="json"),
        "format": written.format,
        "source_format": plan.source.format,
        "bytes": plan.target.size_bytes,
        "dtype": written.info.dtype,
        "cast_elements": caster.elements,
        "cast_overflows": sum(caster.overflows.values()),
        "has_tokenizer": has_tokenizer,
        **dropped_and_kept(plan),
    }
    if caster.overflows:
        summary["overflowed_tensors"] = dict(caster.overflows)
        summary["notes"].append(
            f"{summary['cast_overflows']} elements became infinite in {written.info.dtype}, "
            f"first in {next(iter(caster.overflows))}"
        )
    if isinstance(plan.target, HuggingFaceTarget):
        summary |= {"architecture": plan.target.architecture, "files": [f.name for f in weight_files(written.path)]}
    else:
        layout = plan.target.layout
        summary |= {"layout": layout.model_dump(mode="json"), "checkpoint": written.path.name}
        if isinstance(plan.target, MegatronTarget):
            summary["files"] = plan.target.files
        else:
            summary["files"] = sorted(written.info.files)
    return summary
