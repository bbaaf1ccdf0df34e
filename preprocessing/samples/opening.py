"""Opens the samples of an index, whatever objective it was built for."""

from collections.abc import Sequence
from pathlib import Path

from contracts.errors import ConfigError
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.bert import BertSamples
from preprocessing.samples.conversations import ConversationSamples
from preprocessing.samples.fim import FimSamples
from preprocessing.samples.gpt import GPTSamples
from preprocessing.samples.index_files import read_description
from preprocessing.samples.t5 import T5Samples

Samples = GPTSamples | FimSamples | BertSamples | T5Samples | ConversationSamples
_BY_KIND: dict[str, type[Samples]] = {
    "causal": GPTSamples,
    "fim": FimSamples,
    "bert": BertSamples,
    "t5": T5Samples,
    "sft": ConversationSamples,
}


def open_samples(
    index_path: str | Path, split: str = "train", datasets: Sequence[str | Path | TokenDataset] = ()
) -> Samples:
    """Open one split of an index; arguments and errors as for `GPTSamples`."""
    kind = read_description(Path(index_path)).get("objective", {"kind": "causal"})["kind"]
    if kind not in _BY_KIND:
        raise ConfigError(f"{index_path} is an index of {kind} samples; known are {', '.join(_BY_KIND)}.")
    return _BY_KIND[kind](index_path, split, datasets)


def open_causal_samples(
    index_path: str | Path, split: str = "train", datasets: Sequence[str | Path | TokenDataset] = ()
) -> GPTSamples | FimSamples:
    """Open samples for a causal model.

    Raises:
        ConfigError: The index was built for another kind of model.
    """
    samples = open_samples(index_path, split, datasets)
    if isinstance(samples, GPTSamples | FimSamples):
        return samples
    raise ConfigError(
        f"{index_path} is an index for BERT, T5 or fine-tuning; pretraining a causal model needs index.objective "
        "causal or fim."
    )
