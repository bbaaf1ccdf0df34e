"""Sizes and choices of a Transformer: one set of layers, in which a family is a set of defaults.

Nothing here reads a file or imports torch. Fields of later releases are `added`, so that the runs
of earlier ones keep their fingerprints.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from contracts.configuration import Settings, added, execution
from training.families import FAMILIES, GATED, Activation, Family, with_family_defaults


class RopeScaling(Settings):
    """How rotary positions reach beyond the length of the first training; as `rope_scaling` of transformers."""

    habits: ClassVar[Mapping[str, str]] = {"type": "rope_type"}

    rope_type: Literal["linear", "llama3", "yarn"] = Field(
        "linear",
        description="linear divides all positions; llama3 only long wavelengths; yarn ramps from turned to divided.",
    )
    factor: float = Field(1.0, ge=1, description="How many times longer the sequences become.")
    original_max_position_embeddings: PositiveInt = Field(
        8192, description="Length of the first training, in tokens; llama3 and yarn need it."
    )
    low_freq_factor: float = Field(1.0, gt=0, description="llama3: wavelengths above original / this are divided.")
    high_freq_factor: float = Field(4.0, gt=0, description="llama3: wavelengths below original / this stay.")
    beta_fast: float = Field(32.0, gt=0, description="yarn: pairs that turn more often than this stay.")
    beta_slow: float = Field(1.0, gt=0, description="yarn: pairs that turn less often than this are divided.")
    attention_factor: float | None = Field(
        None, gt=0, description="yarn: scale of the cosines and sines. Default: 0.1 ln(factor) + 1."
    )
    truncate: bool = Field(True, description="yarn: begin and end of the ramp are whole numbers of pairs.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor ({self.low_freq_factor})."
            )
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast ({self.beta_fast}) must be above beta_slow ({self.beta_slow}).")
        return self


class MoeConfig(Settings):
    """Experts in place of the MLP, of which each token meets `top_k` (Shazeer et al. 2017, arXiv:1701.06538)."""

    habits: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "top_k",
        "moe_router_topk": "top_k",
        "moe_intermediate_size": "ffn_hidden_size",
        "moe_ffn_hidden_size": "ffn_hidden_size",
        "norm_topk_prob": "normalize_top_k",
        "router_aux_loss_coef": "aux_loss_coef",
        "moe_aux_loss_coeff": "aux_loss_coef",
        "moe_z_loss_coeff": "z_loss_coef",
        "moe_expert_capacity_factor": "capacity_factor",
        "shared_expert_intermediate_size": "shared_ffn_hidden_size",
        "decoder_sparse_step": "layer_interval",
    }

    num_experts: PositiveInt = Field(8, le=4096, description="Experts of a layer.")
    top_k: PositiveInt = Field(2, description="Experts that a token meets.")
    ffn_hidden_size: PositiveInt | None = Field(
        None, description="Inner width of an expert. Default: the model's ffn_hidden_size."
    )
    normalize_top_k: bool = Field(
        True,
        description="The chosen experts' weights add up to 1, which is a softmax after the choice; "
        "false leaves them as the softmax over all experts gave them.",
    )
    layer_interval: PositiveInt = Field(1, description="Every so manyth layer has experts, the others a plain MLP.")
    shared_ffn_hidden_size: PositiveInt | None = Field(
        None, description="Inner width of an expert that every token meets, weighed by a sigmoid gate. Default: none."
    )
    capacity_factor: float | None = Field(
        None,
        gt=0,
        description="An expert takes at most this many times its even share of a row's tokens, the first ones; "
        "the others pass it by. Default: no limit (dropless).",
    )
    aux_loss_coef: float = Field(
        0.0, ge=0, description="Weight of the load-balancing loss, a mean over rows and over layers."
    )
    z_loss_coef: float = Field(
        0.0, ge=0, description="Weight of the mean squared log-sum-exp of the router's logits, a mean over layers."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k ({self.top_k}) is above num_experts ({self.num_experts}). Use at most {self.num_experts}."
            )
        return self


class ModelConfig(Settings):
    """Sizes and choices of one Transformer: a decoder, an encoder, or both.

    `family` sets what is not given: gpt2 means LayerNorm, GELU (tanh), learned positions, biases and
    tied embeddings; llama means RMSNorm, SwiGLU, rotary positions, no biases and an own output matrix.
    mistral is llama (with a sliding_window where set); qwen2 adds biases to query, key and value; qwen3
    a norm on each query and key head; neox means LayerNorm, GELU, biases, a quarter of each head turned,
    and attention beside the MLP; mixtral and qwen3_moe are mistral and qwen3 with experts. bert means an
    encoder with LayerNorm behind each sum (norm_position: pre is Megatron's BERT), learned positions, two
    kinds of tokens, and heads for masked tokens and for pairs of segments; roberta has no pairs. t5 means
    encoder and decoder, RMSNorm, relative positions and no biases (t5 v1.1: activation: geglu_tanh and
    tied_embeddings: false).
    """

    habits: ClassVar[Mapping[str, str]] = {
        "num_key_value_heads": "num_query_groups",
        "num_hidden_layers": "num_layers",
        "n_layer": "num_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "kv_channels": "head_dim",
        "rope_theta": "rotary_base",
        "rotary_pct": "rotary_percent",
        "partial_rotary_factor": "rotary_percent",
        "use_parallel_residual": "parallel_residual",
        "qk_layernorm": "qk_norm",
        "window_size": "sliding_window",
        "embedding_multiplier": "embedding_scale",
        "tie_word_embeddings": "tied_embeddings",
        "make_vocab_size_divisible_by": "vocab_multiple",
        "d_model": "hidden_size",
        "d_ff": "ffn_hidden_size",
        "d_kv": "head_dim",
        "num_heads": "num_attention_heads",
        "num_decoder_layers": "decoder_layers",
        "type_vocab_size": "token_types",
        "relative_attention_num_buckets": "relative_buckets",
        "relative_attention_max_distance": "relative_distance",
    }

    family: Family = Field(
        "gpt2",
        description="Defaults of the fields below: gpt2, llama, mistral, qwen2, qwen3, neox, mixtral, qwen3_moe, "
        "bert, roberta or t5.",
    )
    num_layers: PositiveInt = Field(4, le=10_000, description="Transformer blocks; of t5 those of the encoder.")
    hidden_size: PositiveInt = Field(256, le=2**20, description="Width of the residual stream.")
    num_attention_heads: PositiveInt = Field(4, description="Query heads.")
    num_query_groups: PositiveInt = Field(
        4, description="Key-value heads; query heads share them evenly. Default: num_attention_heads."
    )
    head_dim: PositiveInt = Field(64, description="Width of one head. Default: hidden_size / num_attention_heads.")
    ffn_hidden_size: PositiveInt = Field(
        1024,
        description="Inner width of the MLP. Default: 4 x hidden_size; gated ones: 8/3 of it, up to a multiple of 64.",
    )
    max_position_embeddings: PositiveInt = Field(1024, description="Longest sequence the model can take, in tokens.")
    vocab_size: PositiveInt | None = Field(
        None, description="Tokens in the vocabulary; taken from the dataset's tokenizer when not set."
    )
    vocab_multiple: PositiveInt = Field(
        128, description="The embedding has the next multiple of this many rows; padding rows never get probability."
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="Kind of normalization.")
    norm_eps: float = Field(1e-5, gt=0, description="Added to the variance in a norm.")
    activation: Activation = Field(
        "gelu_tanh",
        description="Non-linearity of the MLP; swiglu (silu), geglu (gelu) and geglu_tanh multiply two matrices.",
    )
    position: Literal["learned", "rope", "relative"] = Field(
        "learned",
        description="How positions enter the model: added to tokens, by turning queries and keys, or as a bias of each "
        "head by distance (t5).",
    )
    rotary_base: float = Field(10000.0, gt=0, description="Base of the rotary wavelengths (theta).")
    tied_embeddings: bool = Field(True, description="The output matrix is the input embedding.")
    linear_bias: bool = Field(True, description="Biases in the attention output and the MLP.")
    qkv_bias: bool = Field(True, description="Biases of the query, key and value projections.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout after the embedding, attention and MLP; 0 is off.")
    init_std: float = Field(0.02, gt=0, description="Standard deviation of the initial weights.")
    backend: Literal["local", "te"] = execution("local", description="Layers: own ones, or Transformer Engine's (GPU).")
    norm_position: Literal["pre", "post"] = added(
        "pre", description="The norm reads what a layer reads (pre), or the sum of a layer's input and output (post)."
    )
    parallel_residual: bool = added(
        False, description="Attention and MLP read the same input, and both are added to it (GPT-J, NeoX)."
    )
    shared_norm: bool = added(False, description="With parallel_residual: attention and MLP share one norm (GPT-J).")
    rotary_percent: float = added(
        1.0, gt=0, le=1, description="Share of each head's width that rotary positions turn; the rest is left as it is."
    )
    rope_scaling: RopeScaling | None = added(None, description="Rotary positions for longer sequences. Default: none.")
    qk_norm: bool = added(False, description="An RMSNorm on each query head and each key head, before they are turned.")
    sliding_window: PositiveInt | None = added(
        None, description="A token sees itself and at most this many tokens minus one before it. Default: all of them."
    )
    embedding_scale: float = added(1.0, gt=0, description="Token embeddings are multiplied by this.")
    moe: MoeConfig | None = added(None, description="Experts in place of the MLP. Default: none.")
    causal: bool = added(True, description="A token sees only those before it; false: the whole row, as in an encoder.")
    token_types: int = added(
        0,
        ge=0,
        le=1024,
        description="Kinds of tokens with an embedding of their own, such as first and second segment.",
    )
    embedding_norm: bool = added(
        False,
        description="A norm behind the sum of the embeddings. Default of bert and roberta: with norm_position: post.",
    )
    position_offset: int = added(
        0, ge=0, le=1024, description="Row of the learned positions that a row's first token reads; 2 in RoBERTa."
    )
    head: Literal["linear", "masked"] = added(
        "linear",
        description="What makes logits: the output matrix; or before it a dense layer, activation and norm, and a bias "
        "behind it (BERT).",
    )
    pair_head: bool = added(
        False, description="The first token says whether two segments belong as they stand (BERT's NSP, ALBERT's SOP)."
    )
    decoder_layers: PositiveInt | None = added(
        None,
        le=10_000,
        description="Blocks of a decoder that reads the output of the num_layers before it. Default of t5: num_layers.",
    )
    relative_buckets: PositiveInt = added(32, description="position: relative: distances that are told apart.")
    relative_distance: PositiveInt = added(
        128, description="position: relative: from this many tokens on, all distances are one bucket."
    )
    scales_scores: bool = added(True, description="Attention scores are divided by the square root of head_dim.")
    output_scale: float = added(
        1.0,
        gt=0,
        description="Activations are multiplied by this before the output matrix. Default of tied t5: h^-1/2.",
    )
    init: Literal["normal", "fan_in"] = added(
        "normal",
        description="Initial matrices: normal with init_std, or with 1 / sqrt(size of the input), which t5 needs.",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_family_defaults(cls, data: Any) -> Any:
        family = data.get("family", "gpt2") if isinstance(data, dict) else None
        return with_family_defaults(data) if isinstance(family, str) and family in FAMILIES else data

    @model_validator(mode="after")
    def _check(self) -> Self:
        heads, groups = self.num_attention_heads, self.num_query_groups
        if self.head_dim == self.hidden_size // heads and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) / num_attention_heads ({heads}) leaves a remainder of "
                f"{self.hidden_size % heads}. "
                f"{choices('num_attention_heads', self.hidden_size, heads)}, or set head_dim."
            )
        if heads % groups:
            raise ValueError(
                f"num_attention_heads ({heads}) / num_query_groups ({groups}) leaves a remainder of {heads % groups}, "
                f"and every group serves as many heads. {choices('num_query_groups', heads, groups)}."
            )
        self._check_positions()
        if self.is_gated and self.linear_bias:
            raise ValueError(f"activation: {self.activation} goes with linear_bias: false (qkv_bias may be true).")
        if self.shared_norm and not self.parallel_residual:
            raise ValueError("shared_norm: true needs parallel_residual: true; one after the other, each has its own.")
        if self.parallel_residual and self.norm_position == "post":
            raise ValueError("norm_position: post needs parallel_residual: false; a norm would stand after the sum.")
        if self.moe is not None and self.linear_bias:
            raise ValueError("moe goes with linear_bias: false; experts have no biases.")
        self._check_encoder()
        return self

    def _check_encoder(self) -> None:
        if not self.causal and self.sliding_window is not None:
            raise ValueError("sliding_window goes with causal: true; an encoder sees the whole row.")
        if self.causal and self.pair_head:
            raise ValueError("pair_head: true needs causal: false, since the first token must see both segments.")
        if (self.position == "relative") != self.is_encoder_decoder:
            raise ValueError("decoder_layers and position: relative go together, as in t5. Set both or neither.")
        if not self.is_encoder_decoder:
            return
        wrong = [
            name
            for name, is_wrong in {
                "causal: true": self.causal,
                "norm_position: post": self.norm_position == "post",
                "parallel_residual: true": self.parallel_residual,
                "moe": self.moe is not None,
                "head: masked": self.head == "masked",
                "pair_head: true": self.pair_head,
                "embedding_norm: true": self.embedding_norm,
                "token_types": self.token_types > 0,
                "backend: te": self.backend == "te",
            }.items()
            if is_wrong
        ]
        if wrong:
            raise ValueError(
                f"decoder_layers ({self.decoder_layers}) does not go with {', '.join(wrong)}. Leave it out."
            )

    def _check_positions(self) -> None:
        if self.position != "rope":
            if self.rope_scaling is not None or self.rotary_percent != 1.0:
                raise ValueError(f"rope_scaling and rotary_percent need position: rope, and it is {self.position}.")
            return
        if self.rotary_dim % 2 or self.rotary_dim == 0:
            what = f"head_dim ({self.head_dim})"
            if self.rotary_percent != 1.0:
                what += f" x rotary_percent ({self.rotary_percent}) = {self.rotary_dim}"
            raise ValueError(
                f"{what} is {'odd' if self.rotary_dim else 'nothing'}, and rotary positions turn pairs. "
                f"Use an even head_dim{'' if self.rotary_percent == 1.0 else ', or another rotary_percent'}."
            )

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED

    @property
    def is_encoder_decoder(self) -> bool:
        return self.decoder_layers is not None

    @property
    def total_layers(self) -> int:
        """Blocks of the encoder and of the decoder, which are numbered through."""
        return self.num_layers + (self.decoder_layers or 0)

    def is_decoder_layer(self, layer: int) -> bool:
        """Whether layer number `layer`, from 0, reads the output of an encoder."""
        return layer >= self.num_layers

    @property
    def rotary_dim(self) -> int:
        """Width of the part of each head that is turned: its first so many channels."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` up to a multiple of `vocab_multiple`, the same at every layout."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is not known yet; the stage takes it from the dataset.")
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def qkv_size(self) -> int:
        """Rows of the fused projection: per group its query heads, one key head, one value head."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.head_dim

    @property
    def cross_kv_size(self) -> int:
        """Rows of the fused projection of an encoder's output: per group one key head, one value head."""
        return 2 * self.num_query_groups * self.head_dim

    @property
    def attention_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def expert_ffn_hidden_size(self) -> int:
        return (self.moe.ffn_hidden_size if self.moe else None) or self.ffn_hidden_size

    def has_experts(self, layer: int) -> bool:
        """Whether layer number `layer`, from 0, has experts in place of an MLP."""
        return self.moe is not None and (layer + 1) % self.moe.layer_interval == 0


def choices(name: str, size: int, asked: int) -> str:
    """Name the divisors of `size` next to `asked`, for a message."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    below, above = [d for d in divisors if d < asked], [d for d in divisors if d > asked]
    return f"Nearest {name}: {' or '.join(str(d) for d in below[-1:] + above[:1])}"
