"""A training step of BERT and of T5 against transformers' models of the same sizes: CPU time as ratios.

The contestants take turns in every round, since only ratios within a run mean anything on a shared machine.
`python benchmarks/encoders.py [--rounds N]`
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from training.config import IGNORE_INDEX, PretrainConfig
from training.mesh import build_mesh, init_single_rank
from training.trainer import Trainer

ROWS, LENGTH, DECODER_LENGTH, VOCABULARY = 8, 256, 64, 8192
GOAL = 1.05


class OneBatch:
    """The same rows at every step: random tokens, of which BERT is to say 15 %; half of the rows end in padding."""

    def __init__(self, family: str) -> None:
        random = np.random.default_rng(0)
        inputs = random.integers(2, VOCABULARY, (ROWS, LENGTH))
        documents = np.zeros((ROWS, LENGTH), dtype=np.int64)
        documents[::2, -16:] = -1
        self.arrays: dict[str, Any] = {"inputs": inputs, "documents": documents}
        if family == "t5":
            said = random.integers(2, VOCABULARY, (ROWS, DECODER_LENGTH + 1))
            self.arrays |= {"decoder_inputs": said[:, :-1], "labels": said[:, 1:]}
            return
        is_said = (random.random((ROWS, LENGTH)) < 0.15) & (documents == 0)
        types = np.tile(np.arange(LENGTH) >= LENGTH // 2, (ROWS, 1)).astype(np.int64)
        self.arrays |= {"labels": np.where(is_said, inputs, IGNORE_INDEX), "token_types": types}
        self.arrays["pair_labels"] = random.integers(0, 2, ROWS)

    def rows(self, _sample_ids: Any) -> dict[str, Any]:
        return self.arrays


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    init_single_rank()
    worst = 0.0
    for family in ("bert", "t5"):
        batch = OneBatch(family)
        config = config_of(family)
        contestants = {"shardline": _ours(config, batch), "transformers": _theirs(config, batch)}
        seconds = _race(contestants, options.rounds)
        ratio = seconds["shardline"] / seconds["transformers"]
        worst = max(worst, ratio)
        listed = ", ".join(f"{name} {value:.3f} CPU s" for name, value in seconds.items())
        print(f"{family:<5} {listed}, ratio {ratio:.2f} (at most {GOAL})")
    dist.destroy_process_group()
    return 0 if worst <= GOAL else 1


def config_of(family: str) -> PretrainConfig:
    """Four layers of 256 (T5: four of each stack), float32."""
    model = {"family": family, "num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    batch = {"seq_length": LENGTH, "micro_batch_size": ROWS, "global_batch_size": ROWS, "train_steps": 1000}
    more = {"decoder_seq_length": DECODER_LENGTH} if family == "t5" else {}
    return PretrainConfig.model_validate({"model": model, **batch, **more, "optimizer": {"clip_grad": 1.0}})


def _ours(config: PretrainConfig, batch: OneBatch) -> Callable[[], Any]:
    trainer = Trainer(config, build_mesh(config.layout))
    return lambda: trainer.train_step(batch)


def _theirs(config: PretrainConfig, batch: OneBatch) -> Callable[[], Any]:
    import transformers

    sizes = config.model
    common = {"vocab_size": VOCABULARY, "attn_implementation": "sdpa"}
    model: Any
    if sizes.is_encoder_decoder:
        layers = {"num_layers": sizes.num_layers, "d_model": sizes.hidden_size, "d_ff": sizes.ffn_hidden_size}
        heads = {"num_heads": sizes.num_attention_heads, "d_kv": sizes.head_dim, "dropout_rate": 0.0}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**layers, **heads, **common))
    else:
        layers = {"num_hidden_layers": sizes.num_layers, "hidden_size": sizes.hidden_size}
        heads = {"num_attention_heads": sizes.num_attention_heads, "intermediate_size": sizes.ffn_hidden_size}
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = transformers.BertForPreTraining(transformers.BertConfig(**layers, **heads, **off, **common))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    arrays = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.arrays.items()}
    told = {"attention_mask": (arrays["documents"] == 0).long(), "labels": arrays["labels"]}
    if config.model.is_encoder_decoder:
        told |= {"decoder_input_ids": arrays["decoder_inputs"]}
    else:
        told |= {"token_type_ids": arrays["token_types"], "next_sentence_label": arrays["pair_labels"]}

    def step() -> None:
        model(arrays["inputs"], **told).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _race(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of a step of each."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, step in contestants.items():
            started = time.process_time()
            step()
            if number:  # the first round warms up
                seconds[name].append(time.process_time() - started)
    return {name: statistics.median(found) for name, found in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
