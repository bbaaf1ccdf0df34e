"""Published models: each has the parameters its source states, and can be named on the command line."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from contracts.documents import load_yaml
from contracts.errors import ConfigError
from flows.model_presets import model_overrides, model_preset, model_presets
from flows.options import settings_of
from flows.pipeline import load_pipeline
from flows.presets import write_preset
from training.config import LayoutConfig, PretrainConfig
from training.estimate import estimate
from training.flops import parameter_count
from training.mesh import build_mesh, init_single_rank
from training.model import TransformerStage

_COUNT = re.compile(r"# [^:]+: (?P<number>[\d.,]+)(?P<unit> [mb]illion)? parameters\.\n# Source: .{20,}")
_UNITS = {None: 1.0, " million": 1e6, " billion": 1e9}


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    init_single_rank()
    yield
    dist.destroy_process_group()


def _settings(name: str) -> PretrainConfig:
    return PretrainConfig.model_validate(load_yaml(model_preset(name)).data)


@pytest.mark.parametrize("name", model_presets())
def test_a_published_model_has_the_parameters_of_its_source(name: str) -> None:
    stated = _COUNT.match(model_preset(name).read_text())
    assert stated, "the file begins with the model's parameters and its source"
    number = float(stated["number"].replace(",", "")) * _UNITS[stated["unit"]]
    model = _settings(name).model
    with torch.device("meta"):
        stage = TransformerStage(model, build_mesh(LayoutConfig()))
    held = sum(parameter.numel() for parameter in stage.parameters())
    rows = (model.padded_vocab_size - (model.vocab_size or 0)) * (1 if model.tied_embeddings else 2)

    assert held == parameter_count(model)
    # Counts of released weights are exact; round ones are those of a paper.
    tolerance = 0.02 if stated["unit"] else 0
    padding = rows * (model.hidden_size + (model.head == "masked"))
    assert held - padding == pytest.approx(number, rel=tolerance, abs=0)


def test_a_copy_of_mt_nlg_takes_280_ranks_with_3_of_its_layers_each() -> None:
    found = estimate(_settings("mt-nlg-530b"))

    assert found.num_ranks == 280
    layers = 3 * (12 * 20480**2 + 13 * 20480) / 8
    assert found.parameters_per_rank == pytest.approx(layers + (51200 / 8 + 2048) * 20480, rel=1e-3)


def test_settings_win_over_a_named_model_and_it_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {num_layers: 3, dropout: 0.1}\nseq_length: 128\n")

    settings = settings_of(
        PretrainConfig, "pretrain", file, [*model_overrides("llama3.2-1b"), "model.num_layers=2"], {}
    )

    model = settings.model
    assert (model.num_layers, model.hidden_size, model.dropout, settings.seq_length) == (2, 2048, 0.1, 128)
    assert model.rope_scaling is not None and model.rope_scaling.factor == 32.0


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"--model pythia-160: .* Did you mean pythia-160m\?"):
        model_overrides("pythia-160")


@pytest.mark.parametrize(("preset", "model"), [("demo", "pythia-70m"), ("llama", "gpt2-small"), ("demo", "t5-small")])
def test_a_pipeline_can_begin_with_a_published_model(tmp_path: Path, preset: str, model: str) -> None:
    path = write_preset(tmp_path, preset, model=model)

    settings = load_pipeline(path, ()).pretrain
    assert settings is not None
    assert settings.model == _settings(model).model
    assert "# Source: " in path.read_text()
