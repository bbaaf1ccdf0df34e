"""Native checkpoints go from layout to layout without losing a bit."""

import json
from dataclasses import replace

import pytest
import torch
from conversion_cases import convert, random_model, write_random
from ranks import run_on_ranks
from training_cases import PatternSource, new_trainer, tiny_config
from whole_checkpoint import whole_tensors

from contracts.errors import ConfigError, InputError, ShardlineError
from contracts.store import ArtifactStore
from conversion.catalogue import equal_bits
from conversion.config import ReshapeConfig
from conversion.native import NativeCatalogue, open_native
from conversion.reading import open_checkpoint
from conversion.stage import RESHAPE
from training.checkpoint import save_checkpoint
from training.safe_pickle import read_dcp_metadata
from training.step_folders import list_checkpoints, read_info

LAYOUTS = [(2, 1, 1), (1, 2, 1), (2, 2, 2), (1, 1, 1)]


def degrees(layout):
    tp, pp, dp = layout
    return {"tensor_parallel": tp, "pipeline_parallel": pp, "data_parallel": dp}


def assert_same_bits(a, b):
    first, second = whole_tensors(a), whole_tensors(b)
    assert first.keys() == second.keys()
    assert all(equal_bits(first[name], second[name]) for name in first)


def placement(folder):
    """Which file holds which piece of which tensor."""
    metadata = read_dcp_metadata(folder)
    files = {(i.fqn, tuple(i.offset)): s.relative_path for i, s in metadata.storage_data.items()}
    return {
        (name, tuple(chunk.offsets), tuple(chunk.sizes)): files[name, tuple(chunk.offsets)]
        for name, entry in metadata.state_dict_metadata.items()
        for chunk in entry.chunks
    }


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_chain_of_layouts_keeps_every_bit_of_weights_and_optimizer(tmp_path, family):
    first = source = write_random(tmp_path / "first", random_model(family))
    for number, layout in enumerate(LAYOUTS):
        artifact = convert(source, tmp_path / f"run{number}", **degrees(layout))
        source = artifact.path / artifact.summary["checkpoint"]

        assert_same_bits(first, source)
        info, before = read_info(source), read_info(first)
        assert (info.step, info.consumed_samples, info.seq_length) == (7, 56, 16)
        assert info.extra["seed"] == before.extra["seed"]
        assert (
            info.layout["tensor_parallel"],
            info.layout["pipeline_parallel"],
            info.layout["data_parallel"],
        ) == layout
        assert artifact.summary["verified_tensors"] == 3 * len(info.parameters)
        assert [item.problem for item in list_checkpoints(artifact.path, digests=True)] == [None]


def _train_and_save(family, layout, root):
    trainer = new_trainer(tiny_config(family, layout))
    trainer.train_step(PatternSource())
    save_checkpoint(trainer, root, keep_last=1)


@pytest.mark.parametrize(
    ("family", "layout"), [("gpt2", (1, 2, 1)), ("gpt2", (2, 1, 2)), ("llama", (2, 2, 1)), ("llama", (1, 1, 4))]
)
def test_files_hold_the_pieces_that_training_itself_would_put_there(tmp_path, family, layout):
    run_on_ranks(layout[0] * layout[1] * layout[2], _train_and_save, family, layout, tmp_path / "trained")
    trained = tmp_path / "trained" / "step-00000001"
    whole = convert(trained, tmp_path / "whole").path

    again = convert(whole, tmp_path / "again", **degrees(layout)).path / "step-00000001"

    assert placement(again) == placement(trained)
    assert_same_bits(trained, again)
    for file in trained.glob("*.distcp"):
        assert (again / file.name).stat().st_size == file.stat().st_size


def test_a_reshape_done_twice_gives_the_same_bytes(tmp_path):
    source = write_random(tmp_path / "source", random_model("llama"))

    first, second = (convert(source, tmp_path / name, **degrees((2, 1, 2))) for name in "ab")

    assert first.manifest.content == second.manifest.content


def test_padding_of_the_vocabulary_grows_where_the_layout_needs_it_and_says_so(tmp_path):
    model = random_model("llama", vocab_multiple=1, vocab_size=99)
    source = write_random(tmp_path / "source", model)

    artifact = convert(source, tmp_path / "target", tensor_parallel=2)

    before, after = whole_tensors(source), whole_tensors(artifact.path / "step-00000007")
    for name in before:
        assert equal_bits(after[name][: len(before[name])], before[name])
        assert not after[name][len(before[name]) :].any()
    assert after["output.weight"].shape[0] == after["optim.output.weight.exp_avg"].shape[0] == 100
    assert any("padded to 100 rows (before: 99)" in note for note in artifact.summary["notes"])
    assert "vocab_multiple" in artifact.summary["model"]


def test_optimizer_and_type_of_the_weights_change_only_when_asked(tmp_path):
    source = write_random(tmp_path / "source", random_model("gpt2"))

    artifact = convert(source, tmp_path / "target", dtype="bf16")
    bare = convert(source, tmp_path / "bare", optimizer=False)

    before, after = whole_tensors(source), whole_tensors(artifact.path / "step-00000007")
    for name, tensor in before.items():
        assert equal_bits(after[name], tensor if name.startswith("optim.") else tensor.bfloat16())
    weights = sum(tensor.numel() for name, tensor in before.items() if not name.startswith("optim."))
    assert artifact.summary["cast_elements"] == weights and artifact.summary["dtype"] == "bfloat16"
    assert not read_info(bare.path / "step-00000007").has_optimizer
    assert bare.summary["dropped"] == ["optimizer state (optimizer: false)"]
    assert not any(name.startswith("optim.") for name in whole_tensors(bare.path / "step-00000007"))


def test_overflow_in_a_narrower_type_is_reported(tmp_path):
    source = write_random(tmp_path / "source", random_model("gpt2"))
    tensors = whole_tensors(source)
    tensors["layers.0.mlp.up.weight"][0, 0] = 1e30
    from training.checkpoint import write_checkpoint

    write_checkpoint(source, tensors, read_info(source))

    artifact = convert(source, tmp_path / "target", dtype="float16")

    assert artifact.summary["overflowed_tensors"] == {"layers.0.mlp.up.weight": 1}


def test_the_newest_whole_step_is_taken_and_another_by_number(tmp_path):
    write_random(tmp_path / "run", random_model("gpt2"), step=3)
    newest = write_random(tmp_path / "run", random_model("gpt2"), step=9)
    (newest / "__0_0.distcp").write_bytes(b"cut")

    assert convert(tmp_path / "run", tmp_path / "a").summary["step"] == 3
    assert convert(tmp_path / "run", tmp_path / "b", step=3).summary["step"] == 3
    with pytest.raises(InputError, match=r"step-00000009: __0_0\.distcp has 3 bytes"):
        convert(tmp_path / "run", tmp_path / "c", step=9)
    with pytest.raises(ConfigError, match=r"step is 4, and .* has 3, 9"):
        convert(tmp_path / "run", tmp_path / "d", step=4)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [((3, 1, 1), r"num_attention_heads \(4\) / layout.tensor_parallel \(3\)"), ((1, 3, 1), "pipeline_parallel")],
)
def test_a_layout_that_cannot_cut_the_model_is_refused_before_anything_is_written(tmp_path, layout, reason):
    source = write_random(tmp_path / "source", random_model("gpt2"))

    with pytest.raises(ConfigError, match=reason):
        convert(source, tmp_path / "target", **degrees(layout))

    assert not (tmp_path / "target").exists()


def test_a_result_that_differs_from_the_source_is_not_published(tmp_path, monkeypatch):
    source = write_random(tmp_path / "source", random_model("gpt2"))
    read, calls = NativeCatalogue.read, []

    def flip(self, name, box):
        tensor = read(self, name, box)
        if "target" in str(self.folder) and name == "final_norm.weight":
            calls.append(name)
            tensor.view(torch.int32)[0] ^= 1
        return tensor

    monkeypatch.setattr(NativeCatalogue, "read", flip)
    with pytest.raises(ShardlineError, match=r"verification failed: tensor final_norm\.weight differs .* in 0\.\.32"):
        convert(source, tmp_path / "target")

    assert calls and not list((tmp_path / "target").glob("*"))


def test_parts_that_do_not_make_up_their_tensor_are_refused(tmp_path):
    import pickle

    source = write_random(tmp_path / "source", random_model("gpt2"))
    metadata = read_dcp_metadata(source)
    entry = metadata.state_dict_metadata["final_norm.weight"]
    metadata.state_dict_metadata["final_norm.weight"] = replace(entry, size=torch.Size([40]))
    (source / ".metadata").write_bytes(pickle.dumps(metadata))

    with pytest.raises(InputError, match=r"parts of tensor final_norm\.weight do not make up its shape \[40\]"):
        open_native(source)


def test_a_manifest_that_contradicts_the_tensors_is_refused(tmp_path):
    source = write_random(tmp_path / "source", random_model("gpt2"))
    data = json.loads((source / "manifest.json").read_text())
    data["model"]["ffn_hidden_size"] = 64
    (source / "manifest.json").write_text(json.dumps(data))

    with pytest.raises(InputError, match=r"layers\.0\.mlp\.up\.weight has the shape \[128, 32\].*\[64, 32\]"):
        convert(source, tmp_path / "target")


def test_a_check_asked_for_later_is_really_made(tmp_path):
    source = str(write_random(tmp_path / "source", random_model("gpt2")))
    store = ArtifactStore(tmp_path / "store")

    plain = RESHAPE.run(ReshapeConfig(checkpoint=source), store=store)
    unchecked = RESHAPE.run(ReshapeConfig(checkpoint=source, verify=False), store=store)
    compared = RESHAPE.run(ReshapeConfig(checkpoint=source, logits=True), store=store)

    assert "logits_max_difference" not in plain.summary and "verified_tensors" not in unchecked.summary
    assert compared.summary["logits_max_difference"] == 0.0
    assert compared.summary["verified_tensors"] == plain.summary["verified_tensors"] > 0
    assert len({plain.fingerprint, unchecked.fingerprint, compared.fingerprint}) == 3


@pytest.mark.parametrize("to", ["native", "huggingface"])
@pytest.mark.parametrize("tokens", [90, 120])
def test_a_vocabulary_is_cut_or_grows_by_rows_of_zeros(tmp_path, to, tokens):
    source = write_random(tmp_path / "source", random_model("llama"))

    made = convert(source, tmp_path / "made", to=to, vocab_size=tokens)

    before, after = open_checkpoint(source), open_checkpoint(made.path)
    assert made.summary["vocab_size"] == tokens == after.info.model["vocab_size"]
    assert any(f"100 to {tokens} tokens" in note for note in made.summary["notes"])
    for name in ("embedding.word.weight", "output.weight"):
        old = before.tensors.read(name, ((0, 100), (0, 32)))
        new = after.tensors.read(name, ((0, tokens), (0, 32)))
        assert equal_bits(new[:100], old[:tokens])
        assert not new[100:].any()


def test_the_mean_of_checkpoints_is_that_of_every_weight(tmp_path):
    model = random_model("gpt2")
    paths = [write_random(tmp_path / f"s{step}", model, step=step) for step in (7, 8, 9)]

    made = convert(paths[0], tmp_path / "mean", average=[str(path) for path in paths[1:]], tensor_parallel=2)
    alone = convert(paths[0], tmp_path / "alone", optimizer=False, tensor_parallel=2)

    tensors = [open_checkpoint(path).tensors for path in paths]
    found = open_checkpoint(made.path).tensors
    assert not any(name.startswith("optim.") for name in found.entries)
    for name, entry in found.entries.items():
        mean = sum(t.read(name, entry.box).double() for t in tensors) / 3
        assert equal_bits(found.read(name, entry.box), mean.float())
    assert made.fingerprint != alone.fingerprint
    assert any("mean of 3 checkpoints (steps 7, 8, 9)" in note for note in made.summary["notes"])


def test_a_mean_of_other_models_or_of_damaged_files_is_refused(tmp_path):
    first = write_random(tmp_path / "a", random_model("gpt2"))
    other = write_random(tmp_path / "b", random_model("gpt2", hidden_size=64))
    with pytest.raises(ConfigError, match="its hidden_size differs"):
        convert(first, tmp_path / "out", average=[str(other)])
    damaged = write_random(tmp_path / "c", random_model("gpt2"), step=8)
    data = bytearray((damaged / "__0_0.distcp").read_bytes())
    data[3000] ^= 4
    (damaged / "__0_0.distcp").write_bytes(data)
    with pytest.raises(InputError, match="is damaged"):
        convert(first, tmp_path / "out", average=[str(damaged)])
    assert not (tmp_path / "out").exists()
