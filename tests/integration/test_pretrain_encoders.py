"""BERT and T5 from sentences to a checkpoint, as a user trains them."""

from pathlib import Path
from typing import Any

import pytest
from conversion_cases import convert
from sentence_corpora import sentence_dataset

from contracts.artifact import Artifact
from contracts.errors import ConfigError
from contracts.store import ArtifactStore
from evaluation.config import EvaluateConfig
from evaluation.stage import EVALUATE
from preprocessing.samples.index_files import read_description
from training.config import PretrainConfig
from training.metrics import METRICS, read
from training.stage import PRETRAIN

pytestmark = pytest.mark.slow
VOCAB = 109


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentences") / "data"
    sentence_dataset(folder, documents=200)
    return folder


def _settings(sentences: Path, family: str, steps: int, **changes: Any) -> PretrainConfig:
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    return PretrainConfig.model_validate(
        {
            "model": {"family": family, "vocab_size": VOCAB, **model, **changes.pop("model", {})},
            "optimizer": {"lr": 1e-2, "warmup_steps": 2},
            "datasets": [str(sentences)],
            "seq_length": 64,
            "micro_batch_size": 4,
            "global_batch_size": 16,
            "train_steps": steps,
            "split": "90,10,0",
            "valid_batches": 1,
            "threads_per_rank": 1,
            **changes,
        }
    )


def _lines(run: Artifact) -> list[dict[str, Any]]:
    return list(read(run.path / METRICS))


def test_bert_learns_words_and_pairs_on_two_ranks_and_its_checkpoint_moves_to_any_layout(
    sentences: Path, tmp_path: Path
) -> None:
    settings = _settings(sentences, "bert", 30, layout={"tensor_parallel": 2})

    run = PRETRAIN.run(settings, store=ArtifactStore(tmp_path / "store"), label="bert")

    lines = _lines(run)
    assert lines[-1]["loss_nats"] < lines[0]["loss_nats"] - 0.2
    assert 0.3 < lines[-1]["pair_loss_nats"] < 1.0
    assert lines[-1]["valid_loss_nats"] < lines[0]["loss_nats"] - 0.2
    assert 0.3 < lines[-1]["valid_pair_loss_nats"] < 1.0 and 0.1 < run.summary["valid_pair_accuracy"] <= 1.0
    moved = convert(run, tmp_path / "moved", tensor_parallel=1, pipeline_parallel=2)
    exported = convert(moved, tmp_path / "exported", to="huggingface")
    assert (exported.path / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="a model of family bert sees whole rows"):
        EVALUATE.run(
            EvaluateConfig(checkpoint=str(run.path), data=str(sentences)), store=ArtifactStore(tmp_path / "store")
        )


def test_roberta_learns_from_one_segment_and_spans(sentences: Path, tmp_path: Path) -> None:
    settings = _settings(
        sentences, "roberta", 20, bert={"pairs": "none", "masking": "span"}, layout={"pipeline_parallel": 2}
    )

    run = PRETRAIN.run(settings, store=ArtifactStore(tmp_path / "store"), label="roberta")

    lines = _lines(run)
    assert lines[-1]["loss_nats"] < lines[0]["loss_nats"] - 0.2
    assert "pair_loss_nats" not in lines[-1]


def test_t5_learns_to_fill_spans_as_a_pipeline_and_its_checkpoint_moves_to_any_layout(
    sentences: Path, tmp_path: Path
) -> None:
    settings = _settings(
        sentences, "t5", 30, layout={"pipeline_parallel": 2, "virtual_pipeline": 2}, t5={"mean_span_length": 2.0}
    )

    run = PRETRAIN.run(settings, store=ArtifactStore(tmp_path / "store"), label="t5")

    lines = _lines(run)
    assert lines[-1]["loss_nats"] < lines[0]["loss_nats"] - 0.2
    assert lines[-1]["valid_loss_nats"] < lines[0]["loss_nats"] - 0.2
    convert(run, tmp_path / "moved", tensor_parallel=2)
    convert(run, tmp_path / "exported", to="huggingface")


def test_fill_in_the_middle_is_a_setting_of_a_causal_run(sentences: Path, tmp_path: Path) -> None:
    run = PRETRAIN.run(
        _settings(sentences, "gpt2", 3, fim={"rate": 0.9}), store=ArtifactStore(tmp_path / "store"), label="fim"
    )

    (index,) = (tmp_path / "store" / "index").iterdir()
    assert read_description(index)["objective"]["settings"]["rate"] == 0.9
    assert len(_lines(run)) == 3


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bert", {"bert": {"pairs": "none"}}, "bert.pairs: none does not go with model.pair_head: true"),
        ("roberta", {"bert": {"pairs": "nsp"}}, "bert.pairs: nsp does not go with model.pair_head: false"),
        ("gpt2", {"bert": {}}, "bert does not go with model.family: gpt2"),
        ("bert", {"fim": {}}, "fim does not go with model.family: bert"),
        ("t5", {"decoder_seq_length": 8}, "decoder_seq_length \\(8\\) is below the"),
        ("gpt2", {"decoder_seq_length": 8}, "decoder_seq_length is for t5"),
        ("t5", {"subset_losses": True}, "subset_losses is for causal models"),
        ("bert", {"reset_position_ids": True}, "are for causal models"),
        ("t5", {"layout": {"pipeline_parallel": 5}}, "model.num_layers \\+ model.decoder_layers \\(4\\) is below"),
    ],
)
def test_settings_of_another_family_are_refused(
    sentences: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _settings(sentences, family, 3, **changes)
