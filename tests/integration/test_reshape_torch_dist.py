"""Megatron-Core's torch_dist checkpoints hold the same bits as the mp_rank folders of the same model."""

import argparse
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conversion_cases import convert
from safetensors import safe_open
from torch import Tensor

from contracts.errors import InputError
from conversion.catalogue import Checkpoint, equal_bits
from conversion.inspection import inspect_checkpoint, verify_checkpoint
from conversion.logits import logits_of
from conversion.native import NativeCatalogue
from conversion.reading import open_checkpoint

FIXTURES = Path(os.environ.get("SHARDLINE_FIXTURES", "")) / "checkpoints"
pytestmark = pytest.mark.skipif(
    not os.environ.get("SHARDLINE_FIXTURES"),
    reason="SHARDLINE_FIXTURES names no folder of other programs' files",
)
MEGATRON = FIXTURES / "megatron"
PAIRS = {
    "llama": ("torch_dist_dp2", "legacy_tp2pp2"),
    "gpt2": ("torch_dist", "legacy_tp2pp2"),
    "gpt2_distopt": ("torch_dist_pp2", "legacy_tp1pp2"),
    "moe": ("torch_dist_ep2", "legacy_ep2"),
}
REAL_ROWS = 130  # of 144 or 160: the others are padding


def _tensors(found: Checkpoint) -> dict[str, Tensor]:
    return {name: found.tensors.read(name, entry.box) for name, entry in found.tensors.entries.items()}


def _require_same(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert list(first) == list(other)
    assert any(name.startswith("optim.") for name in first)
    for name, tensor in first.items():
        rows = slice(REAL_ROWS) if "embedding.word" in name or "output.weight" in name else slice(None)
        assert equal_bits(tensor[rows], other[name][rows]), name


@pytest.mark.parametrize("family", list(PAIRS))
def test_weights_and_optimizer_are_those_of_the_rank_files(family: str) -> None:
    ours, theirs = (open_checkpoint(MEGATRON / family / name) for name in PAIRS[family])

    _require_same(_tensors(ours), _tensors(theirs))
    assert ours.info.step == theirs.info.step and ours.info.consumed_samples == theirs.info.consumed_samples
    assert ours.info.model == open_checkpoint(MEGATRON / family / PAIRS[family][0]).info.model


@pytest.mark.parametrize("family", ["gpt2", "moe"])
def test_logits_are_those_that_megatron_computed(family: str, tmp_path: Path) -> None:
    with safe_open(MEGATRON / family / "expected.safetensors", "pt") as expected:
        tokens, logits = expected.get_tensor("input_ids"), expected.get_tensor("logits")

    made = convert(MEGATRON / family / PAIRS[family][0], tmp_path / "out", tensor_parallel=2)

    torch.testing.assert_close(logits_of(open_checkpoint(made.path), tokens), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt2_distopt"])
def test_what_goes_to_rank_files_has_the_bits_of_megatrons(family: str, tmp_path: Path) -> None:
    source, target = PAIRS[family]
    degrees = {"tensor_parallel": 2 if "tp2" in target else 1, "pipeline_parallel": 2}

    made = convert(MEGATRON / family / source, tmp_path / "out", to="megatron", **degrees)

    _require_same(_tensors(open_checkpoint(made.path)), _tensors(open_checkpoint(MEGATRON / family / target)))


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [("llama", "distributed (fully_reshardable)"), ("gpt2", "plain Adam")],
)
def test_inspect_says_how_it_was_stored(family: str, optimizer: str) -> None:
    found = inspect_checkpoint(MEGATRON / family / PAIRS[family][0])

    assert (found["format"], found["step"], found["consumed_samples"]) == ("mcore_dist", 3, 12)
    assert found["stored"]["optimizer"] == optimizer
    assert found["stored"]["layers"] == "stacked in one tensor"
    assert (found["stored"]["vocab_size"], found["stored"]["padded_vocab_size"]) == (129, 144)
    assert found["layout"]["tensor_parallel"] == 1 and found["suspicious"] == []


@pytest.mark.parametrize(
    ("family", "name", "optimizer"),
    [
        ("llama", "legacy_tp2pp2", "distributed, flat buffers (distrib_optim.pt)"),
        ("gpt2", "legacy_tp1pp1", "plain Adam"),
        ("gpt2", "convert_py_tp2pp2", "none"),
    ],
)
def test_inspect_says_how_rank_files_were_stored(family: str, name: str, optimizer: str) -> None:
    found = inspect_checkpoint(MEGATRON / family / name)["stored"]

    assert found["optimizer"] == optimizer and found["checkpoint_version"] >= 3
    assert found["rank_files"] == (1 if "tp1" in name else 4)
    assert found["padded_vocab_size"] >= 144


def test_a_flipped_bit_is_found_by_its_sum(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(MEGATRON / "gpt2" / "torch_dist", source)
    assert verify_checkpoint(source) == []
    catalogue = NativeCatalogue(source / "iter_0000003")
    chunk = catalogue.chunks["optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"][2]
    chunk.path.chmod(0o755)
    data = bytearray(chunk.path.read_bytes())
    data[chunk.offset + chunk.length // 2] ^= 1
    chunk.path.write_bytes(data)

    with pytest.raises(InputError, match=r"exp_avg\.decoder.*linear_fc1\.weight at .* its checksum differs"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert any("its checksum differs" in problem for problem in verify_checkpoint(source))


def _stored(family: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and states of a fixture under the names of the file."""
    catalogue = NativeCatalogue(next((MEGATRON / family / PAIRS[family][0]).glob("iter_*")))
    tensors = {name: catalogue.read(name, entry.box) for name, entry in catalogue.entries.items()}
    return (
        {n: t for n, t in tensors.items() if not n.startswith("optimizer.")},
        {n: t for n, t in tensors.items() if n.startswith("optimizer.")},
    )


def _write(folder: Path, tensors: Mapping[str, Tensor], args: argparse.Namespace) -> Path:
    folder = folder / "iter_0000003"
    dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 3}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("3")
    return folder.parent


def _rank_files(family: str, output: Path, **degrees: int) -> tuple[argparse.Namespace, dict[tuple[int, int], Any]]:
    """Write a fixture as rank files; return their args, and the flat buffer of each tensor x pipeline rank."""
    made = convert(MEGATRON / family / PAIRS[family][0], output, to="megatron", **degrees)
    buffers = {}
    with torch.serialization.safe_globals([argparse.Namespace]):
        for path in made.path.rglob("model_optim_rng.pt"):
            args = torch.load(path, weights_only=True)["args"]
            tp, pp = (int(n) for n in f"{path.parent.name}_0".split("_")[2:4])
            flat = path.with_name("distrib_optim.pt")
            if flat.is_file():
                buffers[tp, pp] = next(iter(torch.load(flat, weights_only=True)[0].values()))
    return args, buffers


@pytest.mark.parametrize("family", ["llama", "gpt2_distopt"])
def test_flat_buffers_of_ranks_are_read_by_the_order_of_parameters(family: str, tmp_path: Path) -> None:
    args, buffers = _rank_files(family, tmp_path / "ranks", tensor_parallel=2, pipeline_parallel=2)
    weights, _ = _stored(family)
    shared = 144 // 2 * 32 if family == "gpt2_distopt" else 0  # the tied embedding has a bucket of its own
    for (tp, pp), buffer in buffers.items():
        total = int(buffer["numel_unpadded"])
        sizes = [n for n in ([total - shared, shared] if pp == 0 else [shared, total - shared]) if n]
        for state in ("param", "exp_avg", "exp_avg_sq"):
            for bucket, part in enumerate(buffer[state].split(sizes)):
                key = f"dp_group_idx_{tp + 2 * pp}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_{bucket}"
                weights[f"optimizer.distributed.{key}.{state}"] = torch.nn.functional.pad(
                    part, (0, -part.numel() % 256)
                )

    found = open_checkpoint(_write(tmp_path / "dp", weights, args))

    _require_same(_tensors(found), _tensors(open_checkpoint(MEGATRON / family / PAIRS[family][0])))
    assert found.facts["optimizer"] == "distributed, flat buffers of the ranks (dp_reshardable)"


def test_flat_buffers_of_another_order_are_refused(tmp_path: Path) -> None:
    args, buffers = _rank_files("llama", tmp_path / "ranks")
    weights, _ = _stored("llama")
    args.transformer_impl = "transformer_engine"  # whose layers have their norms elsewhere
    for state in ("param", "exp_avg", "exp_avg_sq"):
        weights[f"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.{state}"] = buffers[0, 0][state]

    with pytest.raises(InputError, match=r"the optimizer's copy of .* is not its weight"):
        open_checkpoint(_write(tmp_path / "dp", weights, args))


def _flattened(tensor: Tensor, counts: list[int]) -> Tensor:
    """Lay out each of the blocks in which a tensor is cut as one row of numbers."""
    for dimension, count in enumerate(counts):
        tensor = tensor.unflatten(2 * dimension, (count, -1))
    order = [*range(0, 2 * len(counts), 2), *range(1, 2 * len(counts), 2)]
    return tensor.permute(order).flatten(len(counts)).contiguous()


def test_blocks_that_are_laid_out_flat_are_put_back(tmp_path: Path) -> None:
    args, _ = _rank_files("llama", tmp_path / "ranks", tensor_parallel=2)
    weights, states = _stored("llama")
    for name, tensor in states.items():
        counts = [4] if ".layers." in name else []
        rows = {"linear_fc1.weight": 4, "linear_qkv.weight": 2, "word_embeddings.weight": 2, "output_layer.weight": 2}
        columns = {"linear_proj.weight": 2, "linear_fc2.weight": 2}
        kind = ".".join(name.split(".")[-2:])
        counts += [rows.get(kind, 1), columns.get(kind, 1)][: tensor.dim() - len(counts)]
        weights[name.replace("state.param.", "state.fp32_param.")] = _flattened(tensor, counts)

    found = open_checkpoint(_write(tmp_path / "flat", weights, args))

    _require_same(_tensors(found), _tensors(open_checkpoint(MEGATRON / "llama" / "torch_dist_dp2")))
    assert found.facts["optimizer"] == "distributed (fully_sharded_model_space)"


@pytest.mark.parametrize("family", ["llama", "moe"])
def test_layers_and_experts_with_tensors_of_their_own_are_read(family: str, tmp_path: Path) -> None:
    args, _ = _rank_files(family, tmp_path / "ranks", optimizer=False)
    tensors: dict[str, Tensor] = {}
    for store in _stored(family):
        for name, tensor in store.items():
            head, _, rest = name.partition("decoder.layers.")
            layers = (
                {f"{head}decoder.layers.{n}.{rest}": part for n, part in enumerate(tensor)} if rest else {name: tensor}
            )
            for one, part in layers.items():
                base, _, last = one.partition("experts.experts.")
                experts = {f"{base}experts.experts.{n}.{last}": p for n, p in enumerate(part)} if last else {one: part}
                for key, value in experts.items():
                    if not key.endswith("linear_fc1.weight"):
                        tensors[key] = value.contiguous()
                        continue
                    for end, half in zip("wv", value.chunk(2), strict=True):
                        tensors[f"{key}_{end}"] = half.contiguous()

    found = open_checkpoint(_write(tmp_path / "single", tensors, args))

    _require_same(_tensors(found), _tensors(open_checkpoint(MEGATRON / family / PAIRS[family][0])))
    assert found.facts["layers"] == "a tensor each"


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/PWNED_conv_fixture_metadata",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("evil_common_pt", r"common\.pt: refused: it names posix\.system, .*\. Nothing of it was run"),
        ("torch_dist_no_metadata_json", r"iter_0000003: has no metadata\.json, .*its save did not finish"),
        ("torch_dist_missing_distcp", r"__1_0\.distcp is missing"),
        ("evil_metadata", r"\.metadata: not the metadata of a distributed checkpoint \(it names posix\.system"),
        ("cut_off", r"__0_1\.distcp is cut off"),
        ("another_backend", r"metadata\.json: sharded_backend is 'zarr'"),
        ("another_model", r"does not know where the tensor vision\.weight of shape \[2\] belongs"),
    ],
)
def test_nasty_files_are_refused_by_name_and_nothing_is_run_or_written(name: str, message: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    is_there = (FIXTURES / "nasty" / name).is_dir()
    shutil.copytree(FIXTURES / "nasty" / name if is_there else MEGATRON / "llama" / "torch_dist_dp2", source)
    folder = source / "iter_0000003"
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    if name == "evil_metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(_Evil()))
    elif name == "cut_off":
        path = folder / "__0_1.distcp"
        path.write_bytes(path.read_bytes()[:-4096])
    elif name == "another_backend":
        (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    elif name == "another_model":
        shutil.copy(folder / "common.pt", tmp_path)
        dcp.save({"vision.weight": torch.zeros(2)}, checkpoint_id=folder, no_dist=True)

    with pytest.raises(InputError, match=message):
        convert(source, tmp_path / "out")

    assert not (tmp_path / "out").exists()
    assert not list(Path("/tmp").glob("PWNED_conv_fixture_*"))
