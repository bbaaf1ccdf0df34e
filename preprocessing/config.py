"""Settings of the preprocessing stages: corpus, tokenizer, ingest, index."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from contracts.configuration import Settings, added, execution
from preprocessing.reading.turns import fields_of
from preprocessing.samples.objectives import BertConfig, FimConfig, Objective, SftConfig, T5Config
from preprocessing.samples.splits import parse_split

END_OF_DOCUMENT = "<|endoftext|>"
MIB = 2**20
MAX_INDEX_ENTRIES = 2**44  # samples, or documents times epochs: far beyond any disk
SPECIAL_GROUPS = {
    "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "fim": ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    "t5": tuple(f"<extra_id_{number}>" for number in range(100)),
}


def _split_text(value: Any) -> Any:
    # YAML and -s read `split: 1` as a number and `[99, 1, 0]` as a list; both mean what they say.
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value)
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _checked_split(value: str) -> str:
    parse_split(value)
    return value


Split = Annotated[str, BeforeValidator(_split_text), AfterValidator(_checked_split)]
"""Weights of train, valid and test, as in "949,50,1"."""


SourceFormat = Literal["auto", "jsonl", "text"]
TextUnit = Literal["line", "paragraph", "document"]


def _format() -> Any:
    return added(
        "auto",
        description="What files of lines hold: JSON objects (jsonl) or plain text. auto: text in .txt and .md files, "
        "JSON else. Parquet, Arrow and WARC files are told by their first bytes.",
    )


def _text_unit() -> Any:
    return added(
        "document",
        description="What is one document in plain text: a line, a paragraph (between blank lines), or the whole file.",
    )


def _preset() -> Any:
    return execution(
        None,
        description="pile: `sources` is the folder of the Pile; its 30 train shards (or val, test) are taken by name, "
        "and its 22 subsets are compared with the published sizes.",
    )


class CorpusConfig(Settings):
    """Gather text into Pile form, with a held-out part chosen by the hash of each document."""

    sources: tuple[str, ...] = execution(
        (),
        description="Files, folders, globs, addresses or hub datasets with your text. Empty: text of this machine.",
    )
    text_key: str = Field("text", description="Key of the text in `sources`; dots go into nested records.")
    subset_key: str = Field("meta.pile_set_name", description="Key of the subset name in `sources`.")
    on_error: Literal["stop", "quarantine"] = Field(
        "stop", description="What a bad record of `sources` does: stop, or be set aside in rejects.jsonl."
    )
    max_bytes: int = Field(
        32 * MIB,
        gt=0,
        description="Text to gather from this machine, in bytes; `sources` are always taken whole.",
    )
    max_document_bytes: int = Field(
        128 * 1024, gt=0, description="Longer files of this machine are left out, so that none dominates."
    )
    heldout_fraction: float = Field(
        0.02, ge=0, lt=1, description="Share of documents that training never sees; evaluation uses them."
    )
    documents_per_file: int = Field(20_000, gt=0, description="Documents in one .jsonl.zst file.")
    format: SourceFormat = _format()
    text_unit: TextUnit = _text_unit()
    preset: Literal["pile"] | None = _preset()


class TokenizerConfig(Settings):
    """Train a tokenizer on a corpus, or take one over."""

    sources: tuple[str, ...] = execution(
        (),
        description="Files, folders, globs, addresses or hub datasets to train on, where no corpus artifact is given.",
    )
    kind: Literal["bpe", "wordpiece", "unigram"] = Field(
        "bpe", description="bpe is byte-level and loses nothing; wordpiece and unigram have an unknown token."
    )
    vocab_size: int = Field(8192, gt=0, description="Tokens in the vocabulary, the end-of-document token included.")
    min_frequency: int = Field(2, ge=1, description="A merge must occur this often (bpe and wordpiece).")
    max_bytes: int = Field(
        256 * MIB, gt=0, description="Text to train on, in bytes, where the corpus has more; see sample."
    )
    sample: Literal["head", "spread"] = added(
        "head",
        description="Which documents of a larger corpus are taken: its first ones, or some from all over it, which a "
        "corpus sorted by source needs.",
    )
    text_key: str = Field("text", description="Key of the text; dots go into nested records.")
    on_error: Literal["stop", "quarantine"] = added(
        "stop", description="What a bad record does: stop, or be passed over and counted."
    )
    special_tokens: tuple[str, ...] = added(
        (),
        description="Further special tokens, by name or by group: bert ([PAD], [UNK], [CLS], [SEP], [MASK]), fim "
        "(<|fim_prefix|>, <|fim_middle|>, <|fim_suffix|>), t5 (<extra_id_0> to <extra_id_99>).",
    )
    format: SourceFormat = _format()
    text_unit: TextUnit = _text_unit()
    preset: Literal["pile"] | None = _preset()

    load: str | None = execution(
        None,
        description="Take over this tokenizer in place of training one: tokenizer.json, SentencePiece .model, "
        "tiktoken ranks, vocab.json with merges.txt, vocab.txt, or a folder.",
    )
    encoding: (
        Literal["gpt2", "r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base", "llama3", "qwen2"] | None
    ) = added(
        None, description="Pattern and special tokens of a file of tiktoken ranks in `load`, where it does not tell."
    )

    @property
    def extra_tokens(self) -> tuple[str, ...]:
        """The further special tokens by name, groups written out, each once."""
        names = (name for item in self.special_tokens for name in SPECIAL_GROUPS.get(item, (item,)))
        return tuple(dict.fromkeys(name for name in names if name != END_OF_DOCUMENT))

    @model_validator(mode="after")
    def _has_room_for_bytes(self) -> "TokenizerConfig":
        if not all(self.special_tokens):
            raise ValueError("special_tokens holds an empty name.")
        if self.kind == "bpe" and self.vocab_size < 257 + len(self.extra_tokens) and self.extra_tokens:
            raise ValueError(
                f"vocab_size is {self.vocab_size}; byte-level BPE with {len(self.extra_tokens)} further special tokens "
                f"needs {257 + len(self.extra_tokens)} or more."
            )
        if self.kind == "bpe" and self.vocab_size < 257:
            raise ValueError(
                f"vocab_size is {self.vocab_size}; byte-level BPE needs 257 or more (256 bytes and {END_OF_DOCUMENT})."
            )
        return self


class TurnsConfig(Settings):
    """Records that are conversations, for fine-tuning on what is said in them."""

    prompt: str = Field(
        "{prompt}",
        description="Template of what is read, with keys of the record in braces, as in 'Q: {question}\\nA: '.",
    )
    response: str = Field("{response}", description="Template of what is to be said.")
    messages: str | None = Field(
        None, description="Key of a list of messages with role and content, in place of prompt and response."
    )
    turn: str = Field(
        "{role}: {content}\n",
        description="Template of a message. Of an assistant's, what stands before {content} is read, the rest is said.",
    )

    @model_validator(mode="after")
    def _templates_have_fields(self) -> "TurnsConfig":
        for name in ("prompt", "response"):
            if not fields_of(getattr(self, name)):
                raise ValueError(f"turns.{name} {getattr(self, name)!r} names no key of the record; write {{key}}.")
        if self.turn.count("{content}") != 1:
            raise ValueError(f"turns.turn {self.turn!r} must hold {{content}} once.")
        return self


class IngestConfig(Settings):
    """Tokenize a corpus into `.bin`/`.idx` shards."""

    sources: tuple[str, ...] = execution(
        (), description="Files, folders, globs, addresses or hub datasets to ingest, where no corpus artifact is given."
    )
    tokenizer: str | None = execution(
        None,
        description="Tokenizer where no artifact is given: tokenizer.json, SentencePiece .model, tiktoken ranks, "
        "vocab.json with merges.txt, vocab.txt, or a folder.",
    )
    corpus_part: str = Field("train", description="Folder of a corpus artifact to ingest: train or heldout.")
    text_key: str = Field("text", description="Key of the text; dots go into nested records, as in meta.text.")
    subset_key: str = Field("meta.pile_set_name", description="Key of the subset name; records may lack it.")
    on_error: Literal["stop", "quarantine"] = Field(
        "stop", description="What a bad record does: stop the stage, or be set aside in rejects.jsonl."
    )
    invalid_unicode: Literal["error", "replace"] = Field(
        "error", description="Invalid UTF-8 and lone surrogates: a bad record, or replaced by U+FFFD and counted."
    )
    keep_empty: bool = Field(False, description="Write empty texts as documents that hold only the EOD token.")
    append_eod: bool = Field(True, description="Append the end-of-document token to every document.")
    eod_token: str | None = Field(
        None, description="End-of-document token by name, where the tokenizer's own choice is not wanted."
    )
    add_bos: bool = Field(False, description="Put the tokenizer's BOS token before every document.")
    shard_tokens: int = Field(
        2**28, gt=0, description="A shard is closed before the document that would take it over this many tokens."
    )
    subsets: tuple[str, ...] = added(
        (),
        description="Ingest only these subsets; records of others count as filtered. Empty: all.",
    )
    sentences: str | None = added(
        None,
        pattern="[a-z]{2,3}",
        description="Divide documents into sentences by the rules of this language (en, de, ...), each a sequence of "
        "the dataset: what BERT's pairs of segments need.",
    )
    turns: TurnsConfig | None = added(
        None,
        description="Records are conversations: prompt and response by template, or messages. Each turn is a "
        "sequence of the dataset: what fine-tuning with pretrain.sft needs.",
    )
    max_rejects: float | None = added(
        None,
        ge=0,
        description="With on_error quarantine: more bad records than this fail the stage. Below 1: a share of all "
        "lines, as in 0.001; 1 or more: a count; 0: none. Empty: any number.",
    )
    part_bytes: int = added(
        256 * MIB,
        ge=1,
        description="Input on disk, in bytes, that one worker, machine or cluster task does by itself. Smaller parts "
        "spread better; larger ones give fewer shards, since each part has its own. Smaller inputs are one part.",
    )
    engine: Literal["auto", "fastokens", "gigatoken", "tiktoken", "pieces", "tokenizers"] = execution(
        "auto",
        description="What runs the tokenizer; the ids are the same. auto: the fastest installed engine that passes an "
        "audit against `tokenizers` in this run; small inputs do without. One that differs anywhere is not used.",
    )
    workers: int | None = execution(
        None,
        ge=1,
        le=1024,
        description="Worker processes, one thread each. Empty: one per core, none for less than 1 MiB of input; "
        "on a cluster: all it has.",
    )
    executor: Literal["local", "ray", "dask"] = execution(
        "local",
        description="Who runs the parts: processes of this machine, or a Ray or Dask cluster, all of whose machines "
        "see sources, store and output under the same paths.",
    )
    cluster: str | None = execution(
        None,
        description="Address of the Ray or Dask cluster, as in ray://head:10001 or tcp://scheduler:8786. "
        "Empty: one is started on this machine.",
    )
    format: SourceFormat = _format()
    text_unit: TextUnit = _text_unit()
    preset: Literal["pile"] | None = _preset()

    @model_validator(mode="after")
    def _limit_of_rejects_is_usable(self) -> "IngestConfig":
        if self.max_rejects is None:
            return self
        if self.on_error != "quarantine":
            raise ValueError("max_rejects needs on_error: quarantine; with stop, the first bad record ends the stage.")
        if self.max_rejects > 1 and not self.max_rejects.is_integer():
            raise ValueError(
                f"max_rejects is {self.max_rejects:g}; give a share below 1, as in 0.001, or a whole number of records."
            )
        return self

    @model_validator(mode="after")
    def _cluster_has_an_executor(self) -> "IngestConfig":
        if self.cluster is not None and self.executor == "local":
            raise ValueError("cluster is the address of a Ray or Dask cluster: set executor to ray or dask with it.")
        return self

    @model_validator(mode="after")
    def _turns_are_alone(self) -> "IngestConfig":
        if self.turns is not None and (self.sentences is not None or self.keep_empty):
            raise ValueError("turns divide documents already, and none is empty; leave out sentences and keep_empty.")
        return self

    @model_validator(mode="after")
    def _empty_documents_have_a_token(self) -> "IngestConfig":
        if self.keep_empty and not self.append_eod:
            raise ValueError("keep_empty needs append_eod: an empty document without EOD would have no token.")
        return self


class BlendPhase(Settings):
    """A stretch of the training samples of a blend."""

    samples: int = Field(..., gt=0, description="Training samples of this phase.")
    weights: tuple[float, ...] = Field(..., description="Weight of each dataset, or subset, in it; 0 leaves it out.")

    @model_validator(mode="after")
    def _weights_are_usable(self) -> "BlendPhase":
        if any(weight < 0 for weight in self.weights) or not 0 < sum(self.weights) < float("inf"):
            raise ValueError(f"weights {list(self.weights)} must be 0 or more, and not all 0.")
        return self


class IndexConfig(Settings):
    """Build sample indices with Megatron-LM's semantics."""

    datasets: tuple[str, ...] = execution(
        (), description="Dataset artifacts or .bin/.idx prefixes, where no inputs are given."
    )
    weights: tuple[float, ...] | None = Field(
        None, description="Weight of each dataset in the blend. Empty: by the number of samples of each."
    )
    seq_length: int = Field(1024, gt=0, description="Tokens the model sees in one sample.")
    samples: int | None = Field(
        None, ge=0, description="Training samples, repeating the data as needed. Empty: one epoch."
    )
    valid_samples: int | None = Field(
        None,
        ge=0,
        description="Validation samples. Empty: one epoch; in a weighted blend, the split's share of samples.",
    )
    test_samples: int | None = Field(None, ge=0, description="Test samples. Empty: as valid_samples.")
    seed: int = Field(1234, ge=0, lt=2**32, description="Seed of the order of documents and samples.")
    split: Split = Field("100,0,0", description="Weights of train, valid and test; see split_by.")
    split_by: Literal["position", "hash"] = added(
        "position",
        description="position: in the order of the dataset, as Megatron-LM; hash: of each document, which stays on its "
        "side when data are appended.",
    )
    subsets: tuple[str, ...] = added(
        (),
        description="Take these subsets of the one dataset as if each were a dataset: weights, epochs and tokens go by "
        "them.",
    )
    epochs: tuple[float, ...] | None = added(
        None, description="How often training reads each dataset, in place of weights and samples; 0.5 is half of it."
    )
    tokens: tuple[int, ...] | None = added(
        None, description="Tokens that training reads of each dataset, in place of weights and samples."
    )
    phases: tuple[BlendPhase, ...] = added(
        (),
        description="A mixture that changes on the way, in place of weights and samples: each phase goes on in every "
        "dataset where the one before stopped, so nothing is read twice that need not be, and nothing is left out.",
    )

    objective: Objective = added("causal", description="What samples are for; fim, bert and t5 have a section each.")
    fim: FimConfig = added(FimConfig(), description="Fill-in-the-middle samples.")
    bert: BertConfig = added(BertConfig(), description="BERT's samples; their documents are rows of sentences.")
    t5: T5Config = added(T5Config(), description="T5's samples; seq_length is that of the encoder.")
    sft: SftConfig = added(SftConfig(), description="Rows of conversations, for fine-tuning.")

    @property
    def is_counted(self) -> bool:
        """Each dataset is read for so many epochs or tokens."""
        return self.epochs is not None or self.tokens is not None

    @model_validator(mode="after")
    def _counts_are_usable(self) -> "IndexConfig":
        if sum(item is not None for item in (self.weights, self.epochs, self.tokens)) > 1:
            raise ValueError("weights, epochs and tokens exclude each other: give one of them.")
        numbers = self.epochs or self.tokens
        if numbers is not None and (any(number < 0 for number in numbers) or sum(numbers) <= 0):
            raise ValueError(f"epochs or tokens {list(numbers)} must be 0 or more, and not all 0.")
        if numbers is not None and self.samples is not None:
            raise ValueError("epochs and tokens say how many samples there are; leave `samples` out.")
        if self.objective == "bert" and self.seq_length < 8:
            raise ValueError(f"seq_length is {self.seq_length}; bert samples need 8 tokens or more.")
        if max(numbers or (0,)) > MAX_INDEX_ENTRIES:
            raise ValueError(f"epochs or tokens {list(numbers or ())} ask for more than an index can hold.")
        return self

    @model_validator(mode="after")
    def _phases_are_usable(self) -> "IndexConfig":
        if not self.phases:
            return self
        if self.weights is not None or self.is_counted:
            raise ValueError("phases have weights of their own; leave out weights, epochs and tokens.")
        if self.samples not in (None, sum(phase.samples for phase in self.phases)):
            raise ValueError(
                f"samples ({self.samples}) is not the sum of those of the phases "
                f"({sum(phase.samples for phase in self.phases)}). Leave it out."
            )
        if len({len(phase.weights) for phase in self.phases}) > 1:
            raise ValueError("every phase must have as many weights: one for each dataset.")
        return self

    @model_validator(mode="after")
    def _weights_are_usable(self) -> "IndexConfig":
        if self.weights is not None:
            if any(weight < 0 for weight in self.weights) or not 0 < sum(self.weights) < float("inf"):
                raise ValueError(f"weights {list(self.weights)} must be 0 or more, and not all 0.")
            if self.samples is None:
                raise ValueError(
                    "weights need `samples`: a weighted blend has no natural end. Set samples, or drop the weights."
                )
        return self
