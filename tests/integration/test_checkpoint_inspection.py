"""inspect, verify, diff and --dry-run of checkpoints."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import shardline
from conversion_cases import convert, published, random_model, write_random
from whole_checkpoint import whole_tensors

from contracts.errors import ConfigError, InputError
from conversion.config import ReshapeConfig
from conversion.inspection import compare_checkpoints, inspect_checkpoint, verify_checkpoint
from conversion.model_digest import model_digest
from conversion.plan import describe_plan
from conversion.reading import open_checkpoint
from training.checkpoint import write_checkpoint
from training.step_folders import read_info

TRN_31 = Path(__file__).parents[1] / "cases" / "TRN-31"


def with_values(folder, change):
    tensors = whole_tensors(folder)
    change(tensors)
    write_checkpoint(folder, tensors, read_info(folder))


@pytest.mark.parametrize("tree", ["legacy", "dcp"])
def test_trn_31_a_half_written_step_is_listed_as_incomplete_with_the_reason(tree):
    found = inspect_checkpoint(TRN_31 / tree)

    newest, older = found["steps"]
    assert newest["step"] == 300 and newest["state"].startswith("incomplete: ")
    assert older["step"] == 200 and older["state"] == "whole"
    assert found["newest_whole_step"] == 200 and "300" in found["warnings"][0]
    assert any("300" in problem for problem in verify_checkpoint(TRN_31 / tree))


def test_inspection_shows_position_layout_types_and_a_row_for_each_parameter(tmp_path):
    source = write_random(tmp_path / "source", random_model("llama"))
    reshaped = convert(source, tmp_path / "reshaped", tensor_parallel=2, dtype="bf16").path

    found = inspect_checkpoint(reshaped)

    assert found["format"] == "native" and found["step"] == 7
    assert (found["consumed_samples"], found["consumed_tokens"]) == (56, 56 * 16)
    assert found["layout"]["tensor_parallel"] == 2 and found["has_optimizer"]
    assert found["dtypes"] == {"bfloat16": 17} and len(found["table"]) == 17
    assert found["table"][0]["name"] == "embedding.word.weight" and found["table"][0]["shape"] == "104x32"
    assert found["suspicious"] == []


def test_inspection_names_values_that_no_training_gives(tmp_path):
    source = write_random(tmp_path / "source", random_model("gpt2"))

    def change(tensors):
        tensors["layers.1.mlp.up.weight"][3, 4] = torch.nan
        tensors["layers.0.attn.out.weight"].zero_()

    with_values(source, change)

    suspicious = inspect_checkpoint(source)["suspicious"]
    assert any("layers.1.mlp.up.weight: 1 of 4096" in line for line in suspicious)
    assert any("layers.0.attn.out.weight: all values are zero" in line for line in suspicious)
    assert any("layers.1.mlp.up.weight has 1 values" in line for line in verify_checkpoint(source))


def test_a_sound_checkpoint_verifies_and_a_damaged_one_is_named(tmp_path):
    source = write_random(tmp_path / "source", random_model("gpt2"))
    assert verify_checkpoint(source) == verify_checkpoint(source.parent) == []
    data = bytearray((source / "__0_0.distcp").read_bytes())
    data[3000] ^= 4
    (source / "__0_0.distcp").write_bytes(data)

    for path in (source, source.parent):
        assert any("__0_0.distcp" in line and "sha256" in line for line in verify_checkpoint(path))


def test_a_foreign_model_is_inspected_and_one_that_cannot_be_read_says_why(tmp_path):
    found = inspect_checkpoint(published("gpt2"))
    assert found["format"] == "huggingface" and found["model"]["family"] == "gpt2" and found["parameters"] == 210304

    shutil.copytree(published("gpt2"), tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    other = inspect_checkpoint(tmp_path / "other")
    assert other["format"] == "huggingface" and "'mamba' is not supported" in other["problem"]


def test_the_same_weights_in_other_layouts_and_formats_are_equal(tmp_path):
    source = write_random(tmp_path / "source", random_model("gpt2"))
    cut = convert(source, tmp_path / "cut", tensor_parallel=2, data_parallel=2).path
    foreign = convert(source, tmp_path / "foreign", to="huggingface").path

    assert compare_checkpoints(source, cut)["different"] == {}
    found = compare_checkpoints(cut, foreign)
    assert found["different"] == {} and found["equal_tensors"] == 28
    assert all(name.startswith("optim.") for name in found["only_in_a"]) and found["only_in_b"] == []


def test_a_difference_is_named_with_its_size(tmp_path):
    first = write_random(tmp_path / "first", random_model("gpt2"))
    second = write_random(tmp_path / "second", random_model("gpt2"))
    with_values(second, lambda tensors: tensors["final_norm.bias"].add_(0.5))

    found = compare_checkpoints(first, second)

    assert list(found["different"]) == ["final_norm.bias"]
    assert found["different"]["final_norm.bias"].startswith("largest difference 0.5")


def test_a_dry_run_says_what_would_be_written_and_dropped_and_writes_nothing(tmp_path):
    source = write_random(tmp_path / "source", random_model("gpt2"))
    before = sorted(tmp_path.rglob("*"))

    export = describe_plan(ReshapeConfig(to="huggingface"), source.parent)
    reshape = describe_plan(ReshapeConfig(tensor_parallel=2, pipeline_parallel=2), source.parent)

    assert export["source_format"] == "native" and export["step"] == 7 and export["architecture"] == "gpt2"
    assert len(export["dropped"]) == 2 and export["files"] == ["model.safetensors"]
    assert reshape["target_layout"] == "tensor 2 x pipeline 2 x data 1" and reshape["num_files"] == 4
    assert reshape["bytes"] == reshape["source_bytes"] and "optimizer state" in reshape["kept"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_refuses_what_a_real_run_would(tmp_path):
    source = write_random(tmp_path / "source", random_model("gpt2"))

    with pytest.raises(ConfigError, match="tensor_parallel"):
        describe_plan(ReshapeConfig(tensor_parallel=3), source)
    with pytest.raises(ConfigError, match="does not exist"):
        describe_plan(ReshapeConfig(), tmp_path / "nothing")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_has_one_digest_in_every_format_and_layout(tmp_path, family, capsys):
    source = write_random(tmp_path / "source", random_model(family))
    cut = convert(source, tmp_path / "cut", tensor_parallel=2, pipeline_parallel=2, optimizer=False).path
    foreign = convert(source, tmp_path / "foreign", to="huggingface").path
    megatron = convert(source, tmp_path / "megatron", to="megatron", tensor_parallel=2).path
    digests = [model_digest(open_checkpoint(path)) for path in (source, cut, foreign)]

    assert len(set(digests)) == 1 and digests[0].startswith("model-1:")
    # In Megatron padding rows are tokens, so that is another model: of 104 tokens.
    assert model_digest(open_checkpoint(megatron)) != digests[0]
    other = write_random(tmp_path / "other", random_model(family), step=8)
    assert model_digest(open_checkpoint(other)) != digests[0]
    shown = shardline(capsys, "inspect", cut, "--digest", "--json")
    assert shown.data["model_digest"] == digests[0]


def test_a_renamed_step_folder_is_no_checkpoint_of_its_name(tmp_path):
    write_random(tmp_path / "run", random_model("gpt2"), step=9)
    (tmp_path / "run" / "step-00000009").rename(tmp_path / "run" / "step-00000012")

    assert any("manifest is that of step 9" in line for line in verify_checkpoint(tmp_path / "run"))
    with pytest.raises(InputError, match="no checkpoint is whole"):
        open_checkpoint(tmp_path / "run")


def test_damaged_weights_have_no_digest(tmp_path, capsys):
    source = write_random(tmp_path / "source", random_model("gpt2"))
    data = bytearray((source / "__0_0.distcp").read_bytes())
    data[3000] ^= 4
    (source / "__0_0.distcp").write_bytes(data)

    shown = shardline(capsys, "inspect", source, "--digest")

    assert shown.code == 1 and "There is no digest of damaged weights" in shown.err
