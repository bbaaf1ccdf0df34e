"""T5's samples: windows of tokens whose noisy spans were taken out, each in its place a sentinel.

After Raffel et al. 2020, arXiv 1910.10683, section 3.1.4: the encoder reads the text with sentinels, the
decoder writes each sentinel and the span that it stands for. Spans are drawn by seed and sample number
alone. The number of spans is fixed by the lengths, so all rows have the same shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.gpt import GPTSamples
from preprocessing.samples.objectives import T5Config
from preprocessing.samples.t5_lengths import SpanLengths, check_sentinels, lengths_of_window

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class T5Batch:
    """Rows for an encoder and a decoder, int64.

    Args:
        encoder_tokens: (rows, encoder) text with sentinels, EOS at the end.
        decoder_tokens: (rows, decoder) the labels moved right by one; the first is the EOS id.
        labels: (rows, decoder) sentinels and spans, EOS at the end.
    """

    encoder_tokens: Ids
    decoder_tokens: Ids
    labels: Ids


class T5Samples:
    """Samples of one split of a T5 index.

    Args:
        index_path: An index artifact, or a folder that `build_index` filled.
        split: "train", "valid" or "test".
        datasets: The datasets it was made for, in its order. Empty: where its manifest says.

    Raises:
        ConfigError: There is no such index or split, or the tokenizer has too few sentinels or no EOS.
        InputError: The datasets are not those of the index.
    """

    def __init__(
        self, index_path: str | Path, split: str = "train", datasets: Sequence[str | Path | TokenDataset] = ()
    ) -> None:
        self.windows = GPTSamples(index_path, split, datasets, kinds=("t5",))
        objective = T5Config.model_validate(self.windows.index.objective["settings"])
        self.lengths = lengths_of_window(self.windows.row_tokens, objective)
        tokenizer = self.windows.datasets[0].tokenizer
        self._eos = tokenizer.require_eod()
        self._sentinels = check_sentinels(tokenizer, self.lengths)
        self._seed: int = self.windows.index.description["seed"]

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, sample_ids: Sequence[int] | npt.NDArray[Any]) -> T5Batch:
        """Return samples by number.

        Raises:
            IndexError: A number is not in [0, num_samples).
        """
        rows = self.windows.tokens(sample_ids)
        encoder = np.empty((len(rows), self.lengths.encoder), dtype=np.int64)
        labels = np.empty((len(rows), self.lengths.decoder), dtype=np.int64)
        for row, (number, tokens) in enumerate(zip(sample_ids, rows, strict=True)):
            random = np.random.default_rng((self._seed, int(number)))
            is_noise = noise_mask(self.lengths, random)
            encoder[row] = self._with_sentinels(tokens, is_noise)
            labels[row] = self._targets(tokens, is_noise)
        decoder = np.concatenate([np.full((len(rows), 1), self._eos, dtype=np.int64), labels[:, :-1]], axis=1)
        return T5Batch(encoder, decoder, labels)

    def _with_sentinels(self, tokens: Ids, is_noise: npt.NDArray[np.bool_]) -> Ids:
        """Replace the first token of each span by its sentinel, drop the rest, and add EOS."""
        is_first = is_noise & ~np.concatenate([[False], is_noise[:-1]])
        result = tokens.copy()
        result[is_first] = self._sentinels[: self.lengths.spans]
        return np.append(result[~is_noise | is_first], self._eos)

    def _targets(self, tokens: Ids, is_noise: npt.NDArray[np.bool_]) -> Ids:
        """Return each sentinel with the tokens of its span, and EOS."""
        is_first = is_noise & ~np.concatenate([[False], is_noise[:-1]])
        spans = np.split(tokens[is_noise], np.flatnonzero(is_first[is_noise])[1:])
        parts = [item for number, span in enumerate(spans) for item in (self._sentinels[number : number + 1], span)]
        return np.append(np.concatenate(parts), self._eos)


def noise_mask(lengths: SpanLengths, random: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Draw which tokens of a window are noise: (window,), a stretch of text first, then a span, in turn."""
    noise = _segments(lengths.noise, lengths.spans, random)
    text = _segments(lengths.window - lengths.noise, lengths.spans, random)
    parts = np.stack([text, noise], axis=1).reshape(-1)
    return np.repeat(np.arange(len(parts)) % 2 == 1, parts)


def _segments(total: int, count: int, random: np.random.Generator) -> Ids:
    """Divide `total` into `count` parts of 1 or more, each division equally likely."""
    cuts = np.sort(random.choice(total - 1, size=count - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))
