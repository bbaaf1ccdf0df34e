"""Legacy Megatron-LM checkpoints, as Megatron-LM wrote them at several layouts: one model each, bit for bit."""

import argparse
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion_cases import convert, random_model, write_random
from safetensors import safe_open

from contracts.errors import ConfigError, InputError
from conversion.assembled import read_stored
from conversion.catalogue import Checkpoint, equal_bits
from conversion.file_reading import FileReader
from conversion.logits import logits_of
from conversion.megatron_folder import iteration_folder
from conversion.reading import open_checkpoint
from conversion.torch_files import read_torch_file, tensors_in

FIXTURES = Path(os.environ.get("SHARDLINE_FIXTURES", "")) / "checkpoints"
pytestmark = pytest.mark.skipif(
    not os.environ.get("SHARDLINE_FIXTURES"),
    reason="SHARDLINE_FIXTURES names no folder of other programs' files",
)
LLAMA = ["legacy_tp1pp1", "legacy_tp1pp1_dp2", "legacy_tp1pp2", "legacy_tp2pp1", "legacy_tp2pp2"]
FAMILIES = {
    "llama": LLAMA,
    "gpt2": ["legacy_tp1pp1", "legacy_tp2pp2", "convert_py_tp2pp2"],
    "gpt2_distopt": ["legacy_tp1pp1", "legacy_tp1pp2"],
    "moe": ["legacy_ep2"],
    "gpt_language_model_names": ["legacy_tp1pp1", "legacy_tp1pp1_qkv_v1"],
    "bert": ["legacy_tp1pp1"],
}
REAL_ROWS = 130  # of 144 or 160: the others are padding, of which a wider layout has more


def _open(family: str, name: str) -> Checkpoint:
    return open_checkpoint(FIXTURES / "megatron" / family / name)


def _tensors(found: Checkpoint) -> dict[str, torch.Tensor]:
    tensors = found.tensors
    return {name: tensors.read(name, entry.box) for name, entry in tensors.entries.items()}


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, names in FAMILIES.items() for name in names[1:]]
)
def test_every_layout_of_a_model_holds_the_same_bits(family: str, name: str) -> None:
    first, other = _tensors(_open(family, FAMILIES[family][0])), _tensors(_open(family, name))

    shared = first.keys() & other.keys()
    assert {n for n in first if not n.startswith("optim.")} <= shared
    if name not in ("convert_py_tp2pp2", "legacy_tp1pp1_qkv_v1"):  # these two have lost their optimizer
        assert first.keys() == other.keys() and any(n.startswith("optim.") for n in first)
    for key in shared:
        a, b = first[key], other[key]
        if "embedding.word" in key or "output.weight" in key:
            a, b = a[:REAL_ROWS], b[:REAL_ROWS]
        if name == "convert_py_tp2pp2":
            a = a.to(b.dtype)
        assert equal_bits(a, b), key


@pytest.mark.parametrize("family", ["llama", "gpt2", "moe", "gpt_language_model_names"])
@pytest.mark.parametrize("to", ["native", "huggingface"])
def test_logits_are_those_that_megatron_computed(family: str, to: str, tmp_path: Path) -> None:
    name = FAMILIES[family][0]
    with safe_open(FIXTURES / "megatron" / family / "expected.safetensors", "pt") as expected:
        tokens, logits = expected.get_tensor("input_ids"), expected.get_tensor("logits")

    made = convert(FIXTURES / "megatron" / family / name, tmp_path / "out", to=to, tensor_parallel=1)

    found = open_checkpoint(made.path)
    torch.testing.assert_close(logits_of(found, tokens), logits, rtol=0, atol=2e-5 if family != "llama" else 2e-2)


def test_bf16_weights_without_masters_give_megatrons_logits(tmp_path: Path) -> None:
    """The recorded logits are of the 16-bit weights; the converted ones are the float32 masters, which differ."""
    with safe_open(FIXTURES / "megatron" / "llama" / "expected.safetensors", "pt") as expected:
        tokens, logits = expected.get_tensor("input_ids"), expected.get_tensor("logits")
    made = convert(FIXTURES / "megatron" / "llama" / "legacy_tp2pp2", tmp_path / "a", dtype="bf16", optimizer=False)

    found = logits_of(open_checkpoint(made.path), tokens)

    torch.testing.assert_close(found[..., :REAL_ROWS], logits[..., :REAL_ROWS], rtol=0, atol=1e-5)


def test_optimizer_step_and_samples_come_along(tmp_path: Path) -> None:
    made = convert(FIXTURES / "megatron" / "llama" / "legacy_tp2pp2", tmp_path / "out", tensor_parallel=2)

    assert made.summary["step"] == 3 and made.summary["consumed_samples"] == 12
    assert "optimizer state" in made.summary["kept"]
    written, source = _tensors(open_checkpoint(made.path)), _tensors(_open("llama", "legacy_tp1pp1"))
    for key, tensor in source.items():
        rows = slice(REAL_ROWS) if "embedding.word" in key or "output.weight" in key else slice(None)
        assert equal_bits(written[key][rows], tensor[rows]), key


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing_rank", "tensor-parallel rank 1, pipeline rank 1.* is missing"),
        ("truncated_pt", "mp_rank_01/model_optim_rng.pt: the file is cut off or damaged"),
        ("bitflip_in_tensor", "a file is damaged or of another checkpoint"),
        ("args_claim_tp4", "args say tensor 4 x pipeline 1"),
        ("vocab_padding_mismatch", "args.padded_vocab_size is 160, and the embeddings have 144 rows"),
        ("replicated_norm_differs", "decoder.layers.2.input_layernorm.weight is not its weight|differs from that in"),
        ("evil_pickle", "it names posix.system, which no checkpoint needs. Nothing of it was run"),
    ],
)
def test_nasty_files_are_refused_by_name_and_nothing_is_run_or_written(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        convert(FIXTURES / "nasty" / name, tmp_path / "out")

    assert not (tmp_path / "out").exists()
    assert not list(Path("/tmp").glob("PWNED_conv_fixture_*"))


def test_a_flipped_bit_that_no_comparison_meets_is_found_by_its_sum(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "megatron" / "gpt2" / "legacy_tp1pp1", source)
    path = next(source.rglob("model_optim_rng.pt"))
    entry = _open("gpt2", "legacy_tp1pp1").tensors
    stored = entry._parts["layers.1.mlp.up.weight"][0].stored  # type: ignore[attr-defined]
    data = bytearray(path.read_bytes())
    data[stored.start + 400] ^= 1
    path.write_bytes(data)

    with pytest.raises(InputError, match=r"model_optim_rng.pt: data/\d+ is not what was written: its checksum differs"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_models_that_are_not_here_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not know where the parameter position_embeddings\.weight belongs"):
        convert(FIXTURES / "megatron" / "t5" / "legacy_tp1pp1", tmp_path / "out")


def test_another_step_is_asked_for_by_number() -> None:
    with pytest.raises(ConfigError, match=r"step is 9, and .* has 3"):
        open_checkpoint(FIXTURES / "megatron" / "llama" / "legacy_tp1pp1", 9)


def test_results_of_different_checkpoints_have_different_fingerprints(tmp_path: Path) -> None:
    made = [
        convert(FIXTURES / "megatron" / "gpt2" / name, tmp_path / name, optimizer=False)
        for name in ("legacy_tp1pp1", "legacy_tp2pp2")
    ]
    again = convert(FIXTURES / "megatron" / "gpt2" / "legacy_tp1pp1", tmp_path / "again", optimizer=False)

    assert made[0].fingerprint != made[1].fingerprint
    assert made[0].fingerprint == again.fingerprint


def _content(folder: Path, rank: str, name: str = "model_optim_rng.pt") -> Any:
    return read_torch_file(next(folder.rglob(f"{rank}/{name}")))


def _bits(value: Any) -> dict[str, torch.Tensor]:
    files = FileReader()
    return {name: read_stored(files, stored) for name, stored in tensors_in(value)}


@pytest.mark.parametrize(
    ("family", "source", "target", "degrees"),
    [
        ("llama", "legacy_tp1pp1", "legacy_tp1pp2", {"pipeline_parallel": 2}),
        ("llama", "legacy_tp2pp2", "legacy_tp2pp1", {"tensor_parallel": 2}),
        ("llama", "legacy_tp2pp1", "legacy_tp2pp2", {"tensor_parallel": 2, "pipeline_parallel": 2}),
        ("gpt2", "legacy_tp2pp2", "legacy_tp2pp2", {"tensor_parallel": 2, "pipeline_parallel": 2}),
        ("gpt2_distopt", "legacy_tp1pp1", "legacy_tp1pp2", {"pipeline_parallel": 2}),
        ("gpt2_distopt", "legacy_tp1pp2", "legacy_tp1pp1", {}),
        ("bert", "legacy_tp1pp1", "legacy_tp1pp1", {}),
    ],
)
def test_what_is_written_is_what_megatron_wrote_at_that_layout(
    family: str, source: str, target: str, degrees: dict[str, int], tmp_path: Path
) -> None:
    wanted = FIXTURES / "megatron" / family / target

    made = convert(FIXTURES / "megatron" / family / source, tmp_path / "out", to="megatron", **degrees)

    ranks = sorted(path.parent.name for path in wanted.rglob("model_optim_rng.pt"))
    assert sorted(path.parent.name for path in made.path.rglob("model_optim_rng.pt")) == ranks
    for rank in ranks:
        ours, theirs = _content(made.path, rank), _content(wanted, rank)
        found, expected = _bits(ours["model"]), _bits(theirs["model"])
        assert list(found) == list(expected)  # the order too: the optimizer counts by it
        for name, tensor in expected.items():
            rows = slice(REAL_ROWS // 2) if "word_embeddings" in name or "output_layer" in name else slice(None)
            assert equal_bits(found[name][rows], tensor[rows]), (rank, name)
        if "state" in theirs["optimizer"]:
            states, others = _bits(ours["optimizer"]["state"]), _bits(theirs["optimizer"]["state"])
            assert states.keys() == others.keys()
            assert all(equal_bits(states[name], others[name]) for name in others)
        if next(wanted.rglob("distrib_optim.pt"), None) is not None:
            name = "distrib_optim.pt"
            (flat,), (other,) = (list(_content(p, rank, name)[0].values()) for p in (made.path, wanted))
            assert flat["numel_unpadded"] == other["numel_unpadded"]
            for state in ("param", "exp_avg", "exp_avg_sq"):
                a, b = _bits(flat)[state], _bits(other)[state]
                # Gaps for alignment hold what the buffer held; padding rows may be other rows.
                assert a.shape == b.shape and float((a != b).float().mean()) < 0.02, (rank, state)
    assert (made.path / "latest_checkpointed_iteration.txt").read_text() == f"{made.summary['step']}"
    assert made.summary["verified_tensors"] > 0


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    made = convert(FIXTURES / "megatron" / "gpt2" / "legacy_tp1pp1", tmp_path / "out", to="megatron", tensor_parallel=2)

    with torch.serialization.safe_globals([argparse.Namespace]):
        found = torch.load(next(made.path.rglob("mp_rank_01/model_optim_rng.pt")), weights_only=True)

    assert found["args"].tensor_model_parallel_size == 2 and found["args"].padded_vocab_size == 144
    qkv = found["model"]["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert qkv.shape == (48, 32) and found["optimizer"]["state"][0]["step"] == 3.0


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_a_native_checkpoint_goes_to_megatron_and_back_bit_by_bit(family: str, tmp_path: Path) -> None:
    source = write_random(tmp_path / "source", random_model(family))

    made = convert(source, tmp_path / "megatron", to="megatron", tensor_parallel=2, pipeline_parallel=2)
    back = convert(made.path, tmp_path / "back")

    first, last = _tensors(open_checkpoint(source)), _tensors(open_checkpoint(back.path))
    assert first.keys() == last.keys()
    assert all(equal_bits(first[name], last[name]) for name in first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "neox"}, "parallel_residual"),
        ({"family": "mistral", "sliding_window": 8}, "sliding_window"),
        ({"family": "gpt2", "num_layers": 3}, "leaves a remainder of 1; to: megatron cuts evenly"),
    ],
)
def test_what_megatron_cannot_express_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = write_random(tmp_path / "source", random_model(changes.pop("family"), **changes))

    with pytest.raises(ConfigError, match=message):
        convert(source, tmp_path / "out", to="megatron", pipeline_parallel=2)
    assert not (tmp_path / "out").exists()


def _swapped(folder: Path) -> None:
    (folder / "mp_rank_00").rename(folder / "x")
    (folder / "mp_rank_01").rename(folder / "mp_rank_00")
    (folder / "x").rename(folder / "mp_rank_01")


def _copied(folder: Path) -> None:
    shutil.rmtree(folder / "mp_rank_01")
    shutil.copytree(folder / "mp_rank_00", folder / "mp_rank_01")


@pytest.mark.parametrize("is_stamped", [True, False])
@pytest.mark.parametrize("change", [_swapped, _copied])
def test_parts_under_other_names_are_refused(change: Any, is_stamped: bool, tmp_path: Path) -> None:
    made = convert(write_random(tmp_path / "s", random_model("gpt2")), tmp_path / "m", to="megatron", tensor_parallel=2)
    folder = tmp_path / "bad" / "iter_0000007"
    shutil.copytree(made.path / "iter_0000007", folder)
    change(folder)
    if not is_stamped:  # as converters write them: one rank for all; then a copy can be seen, and an exchange not
        for path in folder.rglob("model_optim_rng.pt"):
            content = torch.load(path, weights_only=False)
            content["args"].rank = 0
            torch.save(content, path)
        if change is _swapped:
            return

    with pytest.raises(InputError, match=r"was written by rank|holds the same part of the model"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["\u00b2", "../other", "/etc", "99999999999999999999"])
def test_a_tracker_that_is_no_number_leads_nowhere(text: str, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)

    with pytest.raises(InputError, match="a number or release is needed"):
        iteration_folder(tmp_path, None)


@pytest.mark.parametrize(
    "pickled",
    [
        pickle.dumps({}, 2)[:-1] + b"r" + (2**28).to_bytes(4, "little") + b".",
        b"cbuiltins\nbytearray\n(J\x00\x94\x35\x77tR.",
    ],
    ids=["a table of 2^28 places", "2 GB of zeros"],
)
def test_a_pickle_that_asks_for_all_memory_is_refused(pickled: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model_optim_rng.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)

    with pytest.raises(InputError, match="refused"):
        read_torch_file(path)


def test_an_optimizer_that_megatron_has_no_place_for_is_refused(tmp_path: Path) -> None:
    source = write_random(tmp_path / "source", random_model("gpt2"))
    with pytest.raises(ConfigError, match=r"keeps the optimizer of float32 weights"):
        convert(source, tmp_path / "out", to="megatron", dtype="bf16")
    made = convert(source, tmp_path / "bf16", to="megatron", dtype="bf16", optimizer=False)

    assert made.summary["dtype"] == "bfloat16"
    with pytest.raises(ValueError, match=r"Leave logits out"):
        convert(source, tmp_path / "out", logits=True, vocab_size=90)
