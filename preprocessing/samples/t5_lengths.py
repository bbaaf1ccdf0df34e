"""How long the window, the encoder row and the decoder row of a T5 sample are."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contracts.errors import ConfigError
from preprocessing.samples.objectives import T5Config
from preprocessing.samples.special_tokens import sentinel_tokens
from preprocessing.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class SpanLengths:
    """Lengths of a sample, in tokens.

    Args:
        window: Of the text.
        noise, spans: Tokens taken out, and in how many spans.
        encoder: window - noise + spans + 1 (EOS).
        decoder: noise + spans + 1 (EOS).
    """

    window: int
    noise: int
    spans: int

    @property
    def encoder(self) -> int:
        return self.window - self.noise + self.spans + 1

    @property
    def decoder(self) -> int:
        return self.noise + self.spans + 1


def lengths_for_encoder(seq_length: int, objective: T5Config) -> SpanLengths:
    """Return the longest window whose encoder row has at most `seq_length` tokens.

    Raises:
        ConfigError: Not even the shortest window fits.
    """
    if lengths_of_window(2, objective).encoder > seq_length:
        raise ConfigError(f"index.seq_length is {seq_length}: too short for a t5 sample.")
    fits, too_long = 2, 4
    while lengths_of_window(too_long, objective).encoder <= seq_length:
        fits, too_long = too_long, 2 * too_long
    while too_long - fits > 1:  # the encoder's length never falls as the window grows
        middle = (fits + too_long) // 2
        if lengths_of_window(middle, objective).encoder <= seq_length:
            fits = middle
        else:
            too_long = middle
    return lengths_of_window(fits, objective)


def lengths_of_window(window: int, objective: T5Config) -> SpanLengths:
    """Return the lengths that follow from a window; at least one token is noise and one is not."""
    noise = min(max(1, round(window * objective.noise_density)), window - 1)
    spans = min(max(1, round(noise / objective.mean_span_length)), noise, window - noise)
    return SpanLengths(window, noise, spans)


def check_sentinels(tokenizer: Tokenizer, lengths: SpanLengths) -> npt.NDArray[np.int64]:
    """Return the sentinels of a tokenizer, in order.

    Raises:
        ConfigError: It has none, fewer than a sample has spans, or no EOS.
    """
    tokenizer.require_eod()
    sentinels = sentinel_tokens(tokenizer)
    if len(sentinels) < lengths.spans:
        raise ConfigError(
            f"a sample of {lengths.window} tokens has {lengths.spans} spans, but the tokenizer has only "
            f"{len(sentinels)} sentinels. Train one with special_tokens=[t5] (100 of them), or use a shorter "
            "seq_length or longer spans."
        )
    return sentinels
