"""What a Megatron checkpoint of any layout and format says of itself besides its tensors."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from contracts.errors import InputError
from conversion.catalogue import Shape
from conversion.megatron_model import MegatronArguments
from training.config import LayoutConfig
from training.model_config import ModelConfig
from training.parameters import stored_parameters
from training.step_folders import CheckpointInfo


def head_dim(args: MegatronArguments) -> int:
    """Return the rows of one head."""
    return args.size("kv_channels", default=args.size("hidden_size") // args.size("num_attention_heads"))


def check_vocabulary(args: MegatronArguments, rows: int) -> None:
    """Compare the rows of the embedding with what `args` say.

    Raises:
        InputError: They differ.
    """
    padded = args.get("padded_vocab_size")
    if padded is not None and padded != rows:
        raise InputError(
            f"{args.path}: args.padded_vocab_size is {padded}, and the embeddings have {rows} rows together. "
            "A part is of another checkpoint."
        )


def expected_shapes(folder: Path, model: ModelConfig, found: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shape of every weight of a model.

    Raises:
        InputError: One was not found, or one too many.
    """
    shapes = {name: shape for name, (shape, _) in stored_parameters(model).items()}
    for name in shapes:
        if name not in found:
            raise InputError(f"{folder}: has no tensor {name}, which its args call for.")
    for name in found:
        if name not in shapes:
            raise InputError(f"{folder}: tensor {name} has no place in the model that its args describe.")
    return shapes


def checkpoint_info(
    content: Mapping[str, Any],
    args: MegatronArguments,
    model: ModelConfig,
    shapes: Mapping[str, Shape],
    *,
    has_optimizer: bool,
    dtype: Mapping[str, Any],
) -> CheckpointInfo:
    """Return step, samples, model and layout.

    Args:
        content: What stands beside the model, `iteration` among it.
        dtype: Name to entry of the tensors.
    """
    iteration = content.get("iteration", content.get("total_iters", 0))
    precision = "bf16" if args.get("bf16") else "fp16" if args.get("fp16") else "float32"
    dtypes = sorted({str(dtype[name].dtype).removeprefix("torch.") for name in shapes})
    layout = LayoutConfig(tensor_parallel=args.tensor_parallel, pipeline_parallel=args.pipeline_parallel)
    return CheckpointInfo(
        step=int(iteration) if isinstance(iteration, int) else 0,
        consumed_samples=args.size("consumed_train_samples", default=0),
        seq_length=args.size("seq_length", "max_position_embeddings"),
        model=model.model_dump(mode="json"),
        layout=layout.model_dump(mode="json"),
        has_optimizer=has_optimizer,
        parameters=dict(shapes),
        dtype="+".join(dtypes),
        extra={"precision": precision, "seed": args.size("seed", default=1234)},
    )


def checkpoint_notes(
    content: Mapping[str, Any],
    args: MegatronArguments,
    model: ModelConfig,
    parts: Iterable[str],
    masters: Collection[str],
) -> tuple[str, ...]:
    """Say what was left aside, and what is not as one may think.

    Args:
        parts: Names of the weights.
        masters: Those that have a float32 copy.
    """
    notes = []
    said = args.get("vocab_size")
    if isinstance(said, int) and said < (model.vocab_size or 0):
        notes.append(
            f"the vocabulary has {model.vocab_size} rows, padding included; in Megatron padding takes part in the "
            f"softmax, so it is kept as tokens (args.vocab_size is {said})"
        )
    if masters and any(name not in masters for name in parts):
        notes.append("some weights have no float32 master")
    if masters:
        notes.append("weights are the optimizer's float32 masters, which round to the stored ones")
    if "rng_state" in content or "random_rng_state" in content:
        notes.append("left behind: generator states, which belong to ranks (nothing here draws from them)")
    if "opt_param_scheduler" in content or "lr_scheduler" in content:
        notes.append("left behind: the scheduler's settings; the schedule is that of the run that goes on")
    return tuple(notes)


def stored_facts(args: MegatronArguments, optimizer: str) -> dict[str, Any]:
    """Return what `inspect` shows of how a checkpoint was written.

    Args:
        optimizer: Its kind.
    """
    return {
        "optimizer": optimizer,
        "expert_parallel": args.expert_parallel,
        "virtual_pipeline": args.virtual_pipeline,
        "vocab_size": args.get("vocab_size"),
        "padded_vocab_size": args.get("padded_vocab_size"),
    }
