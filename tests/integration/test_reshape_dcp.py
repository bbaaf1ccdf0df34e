"""Plain DCP folders, and safetensors shards that its Hugging Face writer leaves, given the config of their model."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conversion_cases import convert
from safetensors.torch import load_file

from contracts.errors import InputError
from conversion.catalogue import equal_bits
from conversion.inspection import inspect_checkpoint
from conversion.reading import open_checkpoint

FIXTURES = Path(os.environ.get("SHARDLINE_FIXTURES", "")) / "checkpoints"
pytestmark = pytest.mark.skipif(
    not os.environ.get("SHARDLINE_FIXTURES"),
    reason="SHARDLINE_FIXTURES names no folder of other programs' files",
)
FOLDERS = ["dcp_dp2_tp2", "hf_writer_consolidated", "hf_writer_consolidated/sharded"]


def _copy(name: str, root: Path, *, has_config: bool = True) -> Path:
    source = root / "source"
    shutil.copytree(FIXTURES / "torch_dcp" / name, source)
    for path in (source, *source.rglob("*")):
        path.chmod(0o755)
    if has_config:
        shutil.copy(FIXTURES / "hf" / "llama_gqa" / "config.json", source)
    return source


@pytest.mark.parametrize("name", FOLDERS)
def test_tensors_are_those_of_the_model_that_was_saved(name: str, tmp_path: Path) -> None:
    source = _copy(name, tmp_path)

    made = convert(source, tmp_path / "out", to="huggingface")

    ours, theirs = (load_file(folder / "model.safetensors") for folder in (made.path, FIXTURES / "hf" / "llama_gqa"))
    assert ours.keys() == theirs.keys()
    assert all(equal_bits(ours[key], theirs[key]) for key in theirs)


def test_the_config_may_lie_one_folder_above(tmp_path: Path) -> None:
    source = _copy("dcp_dp2_tp2", tmp_path, has_config=False)
    shutil.copy(FIXTURES / "hf" / "llama_gqa" / "config.json", tmp_path)

    found = inspect_checkpoint(source)

    assert found["format"] == "dcp" and found["model"]["num_layers"] == 4
    assert any("left behind: 2 tensors that are no weights" in note for note in found["notes"])


@pytest.mark.parametrize("name", FOLDERS)
def test_without_a_config_what_is_needed_is_said(name: str, tmp_path: Path) -> None:
    source = _copy(name, tmp_path, has_config=False)

    with pytest.raises(InputError, match=r"config\.json.*(Put it there|any prefix)"):
        open_checkpoint(source)

    found = inspect_checkpoint(source)
    assert "config.json" in found["problem"]
    if name != "hf_writer_consolidated":
        assert found["stored"]["tensors"] >= 39 and found["stored"]["types"] == "float32"


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/PWNED_conv_fixture_dcp",)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("names", r"has no tensor model\.embed_tokens\.weight under any prefix, .*names of another program"),
        ("evil", r"\.metadata: not the metadata of a distributed checkpoint \(it names posix\.system"),
        ("missing", r"__2_0\.distcp is missing"),
        ("config", r"calls for"),
    ],
)
def test_nasty_folders_are_refused_and_nothing_is_written(damage: str, message: str, tmp_path: Path) -> None:
    source = _copy("dcp_dp2_tp2", tmp_path)
    if damage == "names":
        dcp.save({"tok_embeddings.weight": torch.zeros(2, 2)}, checkpoint_id=source, no_dist=True)
    elif damage == "evil":
        (source / ".metadata").write_bytes(pickle.dumps(_Evil()))
    elif damage == "missing":
        (source / "__2_0.distcp").unlink()
    else:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 160}))

    with pytest.raises(InputError, match=message):
        convert(source, tmp_path / "out")

    assert not (tmp_path / "out").exists() and not list(Path("/tmp").glob("PWNED_conv_fixture_*"))


@pytest.mark.parametrize("damage", ["missing", "no offsets"])
def test_shards_that_do_not_fit_together_are_refused(damage: str, tmp_path: Path) -> None:
    source = _copy("hf_writer_consolidated/sharded", tmp_path)
    path = source / "shard-00003-model-00001-of-00003.safetensors"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"DCP_SHARDING_INFO", b"DCP_SHARDING_NONE", 1))

    with pytest.raises(InputError, match=r"do not make up its shape|does not say where its shards belong"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
