"""Tiny encoders and encoder-decoders, batches for them, and their models in transformers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from reference_models import HeldTensors
from torch import Tensor

from conversion.huggingface_architecture import architecture_of
from conversion.huggingface_config import to_huggingface
from conversion.huggingface_names import links_of
from conversion.linked_rows import derive_canonical, derive_foreign
from training.config import IGNORE_INDEX
from training.data import Batch
from training.model_config import ModelConfig
from training.parameters import stored_parameters

PADDING = -1  # number of the document of padding
SHORT = {"relative_buckets": 8, "relative_distance": 12}

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "bert relu untied": ("bert", {"activation": "relu", "tied_embeddings": False}),
    "megatron bert": ("bert", {"norm_position": "pre", "activation": "gelu_tanh"}),
    "roberta": ("roberta", {}),
}
T5S: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {**SHORT, "head_dim": 16}),
    "t5 v1.1": ("t5", {**SHORT, "activation": "geglu_tanh", "tied_embeddings": False, "decoder_layers": 3}),
}


def encoder_batch(model: ModelConfig, rows: int, length: int, *, seed: int = 3) -> Batch:
    """Rows of which some tokens are to be said, the last of every second row is padding, in two segments."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    # transformers gives the embeddings of its padding, which is 0 or 1, no gradient.
    inputs = 2 + numbers((model.vocab_size or 0) - 2, rows, length)
    documents = torch.zeros(rows, length, dtype=torch.int64)
    documents[::2, -5:] = PADDING
    labels = torch.where(numbers(4, rows, length) == 0, numbers(model.vocab_size or 0, rows, length), IGNORE_INDEX)
    labels[:, 1] = inputs[:, 2]
    labels[documents == PADDING] = IGNORE_INDEX
    context = {"documents": documents}
    if model.token_types > 1:
        context["token_types"] = (torch.arange(length) >= length // 2).long().expand(rows, -1) * (documents == 0)
    if model.pair_head:
        context["pair_labels"] = numbers(2, rows)
    return Batch(inputs, labels, torch.arange(rows), True, context)


def t5_batch(model: ModelConfig, rows: int, length: int, decoder_length: int, *, seed: int = 3) -> Batch:
    """Rows of an encoder, the last tokens of every second one padding, and of a decoder with padding at the end."""
    generator = torch.Generator().manual_seed(seed)
    vocab = model.vocab_size or 0
    inputs = torch.randint(0, vocab, (rows, length), generator=generator)
    said = torch.randint(0, vocab, (rows, decoder_length + 1), generator=generator)
    documents = torch.zeros(rows, length, dtype=torch.int64)
    documents[::2, -5:] = PADDING
    labels = said[:, 1:].clone()
    labels[:, -2:] = IGNORE_INDEX
    context = {"documents": documents, "decoder_inputs": said[:, :-1].contiguous()}
    return Batch(inputs, labels, torch.arange(rows), True, context)


class EncoderSource:
    """Rows for every training step, fixed by the sample's number; a model can learn something of them."""

    def __init__(self, model: ModelConfig, length: int, decoder_length: int) -> None:
        self.model, self.length, self.decoder_length = model, length, decoder_length

    def rows(self, sample_ids: Any) -> dict[str, Any]:
        rows = [self._row(int(number)) for number in sample_ids]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def _row(self, number: int) -> dict[str, Any]:
        batch = (
            t5_batch(self.model, 1, self.length, self.decoder_length, seed=number)
            if self.model.is_encoder_decoder
            else encoder_batch(self.model, 1, self.length, seed=number)
        )
        row = {"inputs": batch.inputs, "labels": batch.labels, **batch.context}
        is_short = number % 3 == 0
        if not is_short:
            row["documents"] = torch.zeros_like(row["documents"])
        return {name: tensor.numpy() for name, tensor in row.items()}


def reference_of(model: ModelConfig, weights: Mapping[str, Tensor]) -> Any:
    """The same model in transformers, with our weights under the names of an export."""
    import transformers

    foreign = derive_foreign(HeldTensors(weights), links_of(model, architecture_of(model)))
    state = {name: foreign.read(name, entry.box).contiguous() for name, entry in foreign.entries.items()}
    config = to_huggingface(model, dtype="float32", token_ids={})
    kind = getattr(transformers, config["architectures"][0])
    settings = kind.config_class.from_dict(config, attn_implementation="eager")
    reference = kind(settings)
    if not model.tied_embeddings:  # transformers ties T5's tables whatever is said
        output = reference.get_output_embeddings()
        output.weight = torch.nn.Parameter(torch.zeros_like(output.weight))
    known = dict(reference.named_parameters())
    assert state.keys() <= known.keys(), state.keys() - known.keys()
    with torch.no_grad():
        for name, tensor in state.items():
            known[name].copy_(tensor)
    return reference.train()


def reference_gradients(reference: Any, model: ModelConfig) -> dict[str, Tensor]:
    """Gradients of a model of transformers by canonical name."""
    links = links_of(model, architecture_of(model))
    names = {link.foreign for link in links}
    held = {name: p.grad for name, p in reference.named_parameters() if name in names}
    shapes = {name: shape for name, (shape, _) in stored_parameters(model).items()}
    ours = derive_canonical(HeldTensors(held), links, shapes)
    return {name: ours.read(name, entry.box) for name, entry in ours.entries.items()}
