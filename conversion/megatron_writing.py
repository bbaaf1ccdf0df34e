"""Writes legacy Megatron-LM checkpoints (`mp_rank_*` folders) for a tensor x pipeline layout, optimizer included.

Names and order are those of Megatron-Core's local layers; the order decides where the optimizer keeps what
(conversion/megatron_optimizer.py). A run of float32 weights gets plain Adam, one of bf16 weights with float32 masters
the distributed optimizer. Files are streamed: no rank's part is ever held.
"""

import argparse
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from contracts.errors import ConfigError
from contracts.files import sync, write_atomically
from contracts.progress import Progress
from conversion.casting import Caster
from conversion.catalogue import Box, Checkpoint, Shape, box_shape, memory_of, num_elements, row_blocks
from conversion.megatron_folder import MODEL_FILE, OPTIMIZER_FILE
from conversion.megatron_optimizer import LocalWeight, flat_places
from conversion.threads import in_threads
from conversion.torch_files import StoredTensor
from conversion.torch_writing import Planned, write_archive
from training.config import LayoutConfig, ModelConfig
from training.parameters import MOMENTS, OPTIMIZER_PREFIX
from training.step_folders import TRACKER

_NO_PATH = Path()


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter of a rank: a box of a canonical tensor."""

    canonical: str
    box: Box


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of a rank.

    Args:
        name: In Megatron's dictionary.
        shape: Of the rank's part.
        pieces: Its rows in order.
        is_shared: The embedding, or its copy, on the first and the last stage.
    """

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    is_shared: bool = False

    @property
    def has_decay(self) -> bool:
        return len(self.shape) > 1 and not self.name.endswith(".bias")


class MegatronTarget:
    """What a reshape to Megatron-LM will write.

    Args:
        source: An open checkpoint.
        caster: Says the types of the written weights.
        model: The source's, with an embedding that the layout divides.
        layout: Tensor and pipeline degrees of the target.
        has_optimizer: Moments are written too.

    Raises:
        ConfigError: Megatron-LM does not compute this model, or its layers cannot be cut evenly.
    """

    def __init__(
        self, source: Checkpoint, caster: Caster, model: ModelConfig, layout: LayoutConfig, *, has_optimizer: bool
    ) -> None:
        self.source, self.caster = source, caster
        self.model, self.layout, self.has_optimizer = model, layout, has_optimizer
        refuse_inexpressible(model, layout)
        precision = source.info.extra.get("precision")
        weights = source.info.parameters
        is_float32 = all(self.caster.dtype_of(n, source.tensors.entries[n].dtype) == torch.float32 for n in weights)
        if has_optimizer:
            self._check_optimizer(is_float32=is_float32)
        self.has_masters = has_optimizer and precision == "bf16" and is_float32
        self.ranks = [(pp, tp) for pp in range(layout.pipeline_parallel) for tp in range(layout.tensor_parallel)]

    def _check_optimizer(self, *, is_float32: bool) -> None:
        entries = self.source.tensors.entries
        states = [f"{OPTIMIZER_PREFIX}{name}.{moment}" for name in self.source.info.parameters for moment in MOMENTS]
        if any(name not in entries for name in states):
            raise ConfigError("to: megatron writes Adam's state, and the checkpoint has another. Use --no-optimizer.")
        if not is_float32:
            raise ConfigError(
                "to: megatron keeps the optimizer of float32 weights; rounded to 16 bits they would lose what it works "
                "on. Leave dtype out, or use --no-optimizer."
            )

    def dtype(self, name: str) -> torch.dtype:
        return self.caster.dtype_of(name, self.source.tensors.entries[name].dtype)

    @property
    def size_bytes(self) -> int:
        return sum(
            planned.size_bytes
            for rank in self.ranks
            for content in self._contents(*rank)
            for planned in _planned(content)
        )

    @property
    def peak_bytes(self) -> int:
        """The most memory that tensors take while they are written: a few blocks for each worker."""
        return 8 * 2**20

    @property
    def files(self) -> list[str]:
        names = [MODEL_FILE, OPTIMIZER_FILE] if self.has_masters else [MODEL_FILE]
        return [f"{self.folder_name}/{self._rank_name(*rank)}/{name}" for rank in self.ranks for name in names]

    @property
    def folder_name(self) -> str:
        return f"iter_{self.source.info.step:07d}"

    def write(self, root: Path, *, progress: Progress, workers: int = 1) -> Path:
        """Write the iteration under `root`; it gets its name when all is on the disk, and the tracker names it last."""
        folder = root / self.folder_name
        unfinished = folder.with_suffix(".tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for number, _ in enumerate(
            in_threads(self._write_rank, [unfinished] * len(self.ranks), self.ranks, workers=workers)
        ):
            progress.update(number + 1, total=len(self.ranks), unit="ranks")
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
        sync(root)
        write_atomically(root / TRACKER, str(self.source.info.step))
        return folder

    def _write_rank(self, unfinished: Path, rank: tuple[int, int]) -> None:
        folder = unfinished / self._rank_name(*rank)
        folder.mkdir()
        for name, content in zip((MODEL_FILE, OPTIMIZER_FILE), self._contents(*rank), strict=False):
            write_archive(folder / name, content)

    def _rank_name(self, pp: int, tp: int) -> str:
        return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if self.layout.pipeline_parallel > 1 else "")

    def _contents(self, pp: int, tp: int) -> list[dict[str, Any]]:
        """Contents of the rank's files: the model and what goes with it, and the distributed optimizer if used."""
        info = self.source.info
        parameters = list(local_parameters(self.model, self.layout, pp, tp))
        content: dict[str, Any] = {
            "args": self._arguments(pp * self.layout.tensor_parallel + tp),
            "checkpoint_version": 3.0,
            "iteration": info.step,
            "model": {p.name: self._weight(p) for p in parameters},
        }
        if not self.has_optimizer:
            return [content]
        if not self.has_masters:
            content["optimizer"] = self._plain_optimizer(parameters)
            return [content]
        groups = [
            {"wd_mult": 1.0, "lr_mult": 1.0, "step": info.step},
            {"wd_mult": 0.0, "lr_mult": 1.0, "step": info.step},
        ]
        content["optimizer"] = {"optimizer": {"param_groups": groups}}
        return [content, self._flat_optimizer(parameters)]

    def _weight(self, parameter: LocalParameter) -> Planned:
        dtype = torch.bfloat16 if self.has_masters else self.dtype(parameter.pieces[0].canonical)
        return Planned(parameter.shape, dtype, lambda: self._data(parameter, "", dtype))

    def _plain_optimizer(self, parameters: Sequence[LocalParameter]) -> dict[str, Any]:
        decaying = [p for p in parameters if p.has_decay]
        order = decaying + [p for p in parameters if not p.has_decay]
        step = torch.tensor(float(self.source.info.step))
        state = {
            number: {
                "step": Planned((), torch.float32, lambda: iter([memory_of(step)])),
                **{moment: self._moment(parameter, moment) for moment in MOMENTS},
            }
            for number, parameter in enumerate(order)
        }
        count = len(decaying)
        groups = [
            {"wd_mult": 1.0, "lr_mult": 1.0, "params": list(range(count))},
            {"wd_mult": 0.0, "lr_mult": 1.0, "params": list(range(count, len(order)))},
        ]
        return {"state": state, "param_groups": groups}

    def _moment(self, parameter: LocalParameter, moment: str) -> Planned:
        return Planned(parameter.shape, torch.float32, lambda: self._data(parameter, moment, torch.float32))

    def _flat_optimizer(self, parameters: Sequence[LocalParameter]) -> dict[Any, Any]:
        weights = [
            LocalWeight(p.name, StoredTensor(_NO_PATH, 0, torch.float32, p.shape), False, p.is_shared)
            for p in parameters
        ]
        starts, total = flat_places(weights, None)
        order = sorted(zip(starts, parameters, strict=True), key=lambda item: item[0])

        def flat(moment: str) -> Planned:
            return Planned((total,), torch.float32, lambda: self._flat_data(order, moment, total))

        buffer = {"param": flat(""), **{m: flat(m) for m in MOMENTS}, "numel_unpadded": total}
        return {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): buffer}}

    def _flat_data(self, order: Sequence[tuple[int, LocalParameter]], moment: str, total: int) -> Iterator[memoryview]:
        done = 0
        for start, parameter in order:
            if start > done:
                yield memoryview(bytes((start - done) * 4))
            yield from self._data(parameter, moment, torch.float32)
            done = start + num_elements(parameter.shape)
        if total > done:
            yield memoryview(bytes((total - done) * 4))

    def _data(self, parameter: LocalParameter, moment: str, dtype: torch.dtype) -> Iterator[memoryview]:
        """Bytes of a rank's part, block by block: of its weight, or of a moment."""
        tensors = self.source.tensors
        for piece in parameter.pieces:
            name = f"{OPTIMIZER_PREFIX}{piece.canonical}.{moment}" if moment else piece.canonical
            for box in row_blocks(piece.box, tensors.entries[name].dtype.itemsize):
                block = tensors.read(name, box)
                block = block if moment else self.caster(name, block)
                yield memory_of(block.to(dtype).contiguous())

    def _arguments(self, rank: int) -> argparse.Namespace:
        model, info, layout = self.model, self.source.info, self.layout
        rows = model.padded_vocab_size
        is_bf16 = self.has_masters or self.dtype("embedding.word.weight") == torch.bfloat16
        values: dict[str, Any] = {
            "tensor_model_parallel_size": layout.tensor_parallel,
            "pipeline_model_parallel_size": layout.pipeline_parallel,
            "virtual_pipeline_model_parallel_size": None,
            "expert_model_parallel_size": 1,
            "context_parallel_size": 1,
            "world_size": layout.tensor_parallel * layout.pipeline_parallel,
            "data_parallel_size": 1,
            "rank": rank,
            "num_layers": model.num_layers,
            "encoder_num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "ffn_hidden_size": model.ffn_hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "group_query_attention": model.num_query_groups != model.num_attention_heads,
            "num_query_groups": model.num_query_groups,
            "kv_channels": model.head_dim,
            "max_position_embeddings": model.max_position_embeddings,
            "seq_length": info.seq_length,
            "position_embedding_type": "rope" if model.position == "rope" else "learned_absolute",
            "rotary_base": int(model.rotary_base),
            "rotary_percent": model.rotary_percent,
            "rotary_interleaved": False,
            "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
            "norm_epsilon": model.norm_eps,
            "layernorm_epsilon": model.norm_eps,
            "swiglu": model.activation == "swiglu",
            "bias_gelu_fusion": model.activation == "gelu_tanh",
            "add_bias_linear": model.linear_bias,
            "add_qkv_bias": model.qkv_bias and not model.linear_bias,
            "qk_layernorm": model.qk_norm,
            "untie_embeddings_and_output_weights": not model.tied_embeddings,
            "padded_vocab_size": rows,
            "make_vocab_size_divisible_by": rows // layout.tensor_parallel,
            "bf16": is_bf16,
            "fp16": False,
            "params_dtype": torch.bfloat16 if is_bf16 else torch.float32,
            "use_distributed_optimizer": self.has_masters,
            "overlap_grad_reduce": False,
            "use_legacy_models": False,
            "transformer_impl": "local",
            "consumed_train_samples": info.consumed_samples,
            "consumed_valid_samples": 0,
            "iteration": info.step,
            "seed": int(info.extra.get("seed", 1234)),
            "attention_dropout": 0.0,
            "hidden_dropout": model.dropout,
            "init_method_std": model.init_std,
            "bert_binary_head": model.pair_head,
            "num_experts": None,
            **_expert_arguments(model),
        }
        return argparse.Namespace(**values)


def local_parameters(model: ModelConfig, layout: LayoutConfig, pp: int, tp: int) -> Iterator[LocalParameter]:
    """List the parameters of a rank in the order in which Megatron-Core's modules register them."""
    hidden, rows = model.hidden_size, model.padded_vocab_size
    is_first, is_last = pp == 0, pp == layout.pipeline_parallel - 1
    is_shared = model.tied_embeddings and layout.pipeline_parallel > 1
    cut = _Cut(tp, layout.tensor_parallel)
    if is_first:
        yield cut.rows("embedding.word_embeddings.weight", "embedding.word.weight", (rows, hidden), is_shared=is_shared)
        if model.position == "learned":
            shape = (model.max_position_embeddings, hidden)
            yield cut.whole("embedding.position_embeddings.weight", "embedding.position.weight", shape)
        if model.token_types:
            name = "embedding.tokentype_embeddings.weight"
            yield cut.whole(name, "embedding.token_type.weight", (model.token_types, hidden))
    stack = "decoder" if model.causal else "encoder"
    count = model.num_layers // layout.pipeline_parallel
    for local in range(count):
        yield from _layer(model, cut, f"{stack}.layers.{local}", f"layers.{pp * count + local}")
    if not is_last:
        return
    yield from _norm(model, cut, f"{stack}.final_layernorm", "final_norm")
    if model.head == "masked":
        for part in ("weight", "bias"):
            size = (hidden, hidden) if part == "weight" else (hidden,)
            yield cut.whole(f"lm_head.dense.{part}", f"head.dense.{part}", size)
        yield from _norm(model, cut, "lm_head.layer_norm", "head.norm")
    if not model.tied_embeddings:
        yield cut.rows("output_layer.weight", "output.weight", (rows, hidden))
    elif not is_first:
        yield cut.rows("output_layer.weight", "embedding.word.weight", (rows, hidden), is_shared=is_shared)
    if model.head == "masked":
        yield cut.rows("output_layer.bias", "output.bias", (rows,))
    if model.pair_head:
        for ours, theirs, out in (("pair.output", "binary_head", 2), ("pair.pooler", "pooler.dense", hidden)):
            yield cut.whole(f"{theirs}.weight", f"{ours}.weight", (out, hidden))
            yield cut.whole(f"{theirs}.bias", f"{ours}.bias", (out,))


def _layer(model: ModelConfig, cut: "_Cut", theirs: str, ours: str) -> Iterator[LocalParameter]:
    hidden = model.hidden_size
    yield from _norm(model, cut, f"{theirs}.input_layernorm", f"{ours}.attn.norm")
    attention = f"{theirs}.self_attention"
    yield from _linear(
        cut, f"{attention}.linear_proj", f"{ours}.attn.out", (hidden, model.attention_size), model.linear_bias
    )
    qkv = (model.qkv_size, hidden)
    yield cut.rows(f"{attention}.linear_qkv.weight", f"{ours}.attn.qkv.weight", qkv)
    if model.qkv_bias:
        yield cut.rows(f"{attention}.linear_qkv.bias", f"{ours}.attn.qkv.bias", qkv[:1])
    for name in ("q", "k") if model.qk_norm else ():
        yield cut.whole(f"{attention}.{name}_layernorm.weight", f"{ours}.attn.{name}_norm.weight", (model.head_dim,))
    yield from _norm(model, cut, f"{theirs}.pre_mlp_layernorm", f"{ours}.mlp.norm")
    if model.moe is None:
        yield from _mlp(model, cut, f"{theirs}.mlp", f"{ours}.mlp", model.ffn_hidden_size)
        return
    yield cut.whole(f"{theirs}.mlp.router.weight", f"{ours}.mlp.router.weight", (model.moe.num_experts, hidden))
    for expert in range(model.moe.num_experts):
        inner = f"{theirs}.mlp.experts.local_experts.{expert}"
        yield from _mlp(model, cut, inner, f"{ours}.mlp.experts.{expert}", model.expert_ffn_hidden_size)


def _mlp(model: ModelConfig, cut: "_Cut", theirs: str, ours: str, width: int) -> Iterator[LocalParameter]:
    hidden = model.hidden_size
    parts = ("gate", "up") if model.is_gated else ("up",)
    yield cut.stacked(f"{theirs}.linear_fc1.weight", [f"{ours}.{part}.weight" for part in parts], (width, hidden))
    if model.linear_bias:
        yield cut.stacked(f"{theirs}.linear_fc1.bias", [f"{ours}.{part}.bias" for part in parts], (width,))
    yield from _linear(cut, f"{theirs}.linear_fc2", f"{ours}.down", (hidden, width), model.linear_bias)


def _linear(cut: "_Cut", theirs: str, ours: str, shape: tuple[int, int], has_bias: bool) -> Iterator[LocalParameter]:
    yield cut.columns(f"{theirs}.weight", f"{ours}.weight", shape)
    if has_bias:
        yield cut.whole(f"{theirs}.bias", f"{ours}.bias", shape[:1])


def _norm(model: ModelConfig, cut: "_Cut", theirs: str, ours: str) -> Iterator[LocalParameter]:
    for part in ("weight", "bias") if model.norm == "layernorm" else ("weight",):
        yield cut.whole(f"{theirs}.{part}", f"{ours}.{part}", (model.hidden_size,))


@dataclass(frozen=True)
class _Cut:
    """Parts of a tensor-parallel rank."""

    rank: int
    size: int

    def whole(self, name: str, canonical: str, shape: Shape) -> LocalParameter:
        return _parameter(name, [(canonical, tuple((0, n) for n in shape))])

    def rows(self, name: str, canonical: str, shape: Shape, *, is_shared: bool = False) -> LocalParameter:
        return _parameter(name, [(canonical, self._rows(shape))], is_shared=is_shared)

    def stacked(self, name: str, canonical: Sequence[str], shape: Shape) -> LocalParameter:
        return _parameter(name, [(one, self._rows(shape)) for one in canonical])

    def columns(self, name: str, canonical: str, shape: tuple[int, int]) -> LocalParameter:
        part = shape[1] // self.size
        return _parameter(name, [(canonical, ((0, shape[0]), (self.rank * part, (self.rank + 1) * part)))])

    def _rows(self, shape: Shape) -> Box:
        part = shape[0] // self.size
        return ((self.rank * part, (self.rank + 1) * part), *((0, n) for n in shape[1:]))


def _parameter(name: str, pieces: Sequence[tuple[str, Box]], *, is_shared: bool = False) -> LocalParameter:
    shapes = [box_shape(box) for _, box in pieces]
    shape = (sum(one[0] for one in shapes), *shapes[0][1:])
    return LocalParameter(name, shape, tuple(Piece(*one) for one in pieces), is_shared)


def _planned(value: Any) -> Iterator[Planned]:
    if isinstance(value, Planned):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _planned(item)


def _expert_arguments(model: ModelConfig) -> dict[str, Any]:
    if model.moe is None:
        return {}
    return {
        "num_experts": model.moe.num_experts,
        "moe_router_topk": model.moe.top_k,
        "moe_ffn_hidden_size": model.expert_ffn_hidden_size,
        "moe_router_pre_softmax": not model.moe.normalize_top_k,
        "moe_layer_freq": 1,
        "moe_grouped_gemm": False,
    }


def refuse_inexpressible(model: ModelConfig, layout: LayoutConfig) -> None:
    """Make sure that Megatron-LM computes a model, at a layout.

    Raises:
        ConfigError: It does not; has the reason.
    """
    reasons = {
        "norm_position: post (Megatron-Core's norms stand before)": model.norm_position == "post",
        "parallel_residual (Megatron-Core's GPT has none)": model.parallel_residual,
        f"activation: {model.activation}": model.activation not in ("gelu", "gelu_tanh", "swiglu"),
        "sliding_window": model.sliding_window is not None,
        "embedding_scale": model.embedding_scale != 1.0,
        "relative positions": model.position == "relative",
        "an encoder with a decoder": model.is_encoder_decoder,
        "position_offset (RoBERTa)": model.position_offset != 0,
        "embedding_norm": model.embedding_norm,
        "rope_scaling": model.rope_scaling is not None,
        "a shared expert": model.moe is not None and model.moe.shared_ffn_hidden_size is not None,
        "experts in some layers only": model.moe is not None and model.moe.layer_interval != 1,
        "linear_bias without qkv_bias": model.linear_bias and not model.qkv_bias,
        "an encoder without its head": not model.causal and model.head != "masked",
        "rotary_base that is no whole number": not math.isclose(model.rotary_base, int(model.rotary_base)),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(f"to: megatron cannot express this model: {', '.join(found)}.")
    if model.num_layers % layout.pipeline_parallel:
        divisors = [n for n in range(1, model.num_layers + 1) if model.num_layers % n == 0]
        raise ConfigError(
            f"model.num_layers ({model.num_layers}) / pipeline_parallel ({layout.pipeline_parallel}) leaves a "
            f"remainder of {model.num_layers % layout.pipeline_parallel}; to: megatron cuts evenly. "
            f"Use one of {divisors}."
        )
