"""Commands that make data: corpus, tokenizer, ingest, index."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from contracts.artifact import Artifact
from contracts.errors import ConfigError
from contracts.store import ArtifactStore
from flows.options import (
    ConfigOption,
    JsonOption,
    OutputOption,
    SetOption,
    StoreOption,
    TrackOption,
    settings_of,
    show,
    store_at,
)
from flows.references import artifact_at
from flows.single_stage import Datasets, datasets_among, run_one

if TYPE_CHECKING:
    from preprocessing.config import IngestConfig

Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        help="Files, folders, globs, addresses (s3://..., https://...), hub datasets (hf://NAME:SPLIT); several.",
        metavar="PATH...",
    ),
]
FormatOption = Annotated[
    Literal["auto", "jsonl", "text"] | None,
    typer.Option("--format", help="What files of lines hold: JSON objects or plain text. Default: by their names."),
]
TextUnitOption = Annotated[
    Literal["line", "paragraph", "document"] | None,
    typer.Option("--text-unit", help="What is one document in plain text. Default: document, the whole file."),
]
PresetOption = Annotated[
    Literal["pile"] | None,
    typer.Option("--preset", help="A published corpus, its files taken by name: --preset pile --source DIR."),
]

OnErrorOption = Annotated[
    Literal["stop", "quarantine"] | None, typer.Option("--on-error", help="What a bad record does. Default: stop.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    for command in (corpus, tokenizer, ingest, index):
        app.command(rich_help_panel="One stage")(command)


def corpus(
    source: Sources = None,
    text_format: FormatOption = None,
    text_unit: TextUnitOption = None,
    preset: PresetOption = None,
    on_error: OnErrorOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Gather text into Pile form (.jsonl.zst with text and meta.pile_set_name), with a held-out part.

    Example: [bold]shardline corpus --source my-texts/*.jsonl --output corpus[/bold]
    """
    from preprocessing.config import CorpusConfig
    from preprocessing.stages import CORPUS

    flags = {
        "sources": source,
        "format": text_format,
        "text_unit": text_unit,
        "preset": preset,
        "on_error": on_error,
    }
    settings = settings_of(CorpusConfig, "corpus", config, overrides, flags)
    hints = ["next: shardline tokenizer --source {path}/train --output tokenizer"]
    run_one(CORPUS, settings, store_at(store, output), as_json=as_json, hints=hints)


def tokenizer(
    source: Sources = None,
    kind: Annotated[Literal["bpe", "wordpiece", "unigram"] | None, typer.Option(help="Model of the tokenizer.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Tokens in the vocabulary.")] = None,
    sample: Annotated[
        Literal["head", "spread"] | None,
        typer.Option(help="Documents taken of a large corpus: the first, or some from all over it. Default: head."),
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(
            help="Take over a tokenizer instead: tokenizer.json, .model, .tiktoken, vocab.json, vocab.txt, a folder.",
            metavar="PATH",
        ),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Encoding of a tiktoken file, as cl100k_base or llama3.", metavar="NAME")
    ] = None,
    text_format: FormatOption = None,
    text_unit: TextUnitOption = None,
    preset: PresetOption = None,
    on_error: OnErrorOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a tokenizer on text, or take one over from another format.

    Example: [bold]shardline tokenizer --source corpus/train --kind bpe --vocab-size 8192 --output tokenizer[/bold]

    Example: [bold]shardline tokenizer --load llama/tokenizer.model --encoding llama3 --output tokenizer[/bold]
    """
    from preprocessing.config import TokenizerConfig
    from preprocessing.stages import TOKENIZER

    where = store_at(store, output)
    inputs, paths = corpus_among(source, where)
    flags = {
        "sources": paths,
        "kind": kind,
        "vocab_size": vocab_size,
        "sample": sample,
        "load": load,
        "encoding": encoding,
        "format": text_format,
        "text_unit": text_unit,
        "preset": preset,
        "on_error": on_error,
    }
    settings = settings_of(TokenizerConfig, "tokenizer", config, overrides, flags)
    hints = ["next: shardline ingest --source TEXT --tokenizer {path} --output dataset"]
    run_one(TOKENIZER, settings, where, inputs=inputs, as_json=as_json, hints=hints)


def corpus_among(sources: Sequence[str] | None, store: ArtifactStore) -> tuple[dict[str, Artifact], list[str] | None]:
    """A single source that names a corpus artifact becomes an input; other sources stay paths."""
    if sources and len(sources) == 1 and not any(letter in sources[0] for letter in "*?["):
        path = Path(sources[0])
        if (path / "manifest.json").is_file() or not path.exists():
            try:
                artifact = artifact_at(sources[0], store, ("corpus",))
            except ConfigError as error:
                if "is needed here" in str(error):
                    raise
                artifact = None  # the reader says what is wrong with the path
            if artifact is not None:
                return {"corpus": artifact}, None
    return {}, list(sources) if sources else None


def ingest(
    source: Sources = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer artifact, or a tokenizer in any known format.", metavar="PATH")
    ] = None,
    text_key: Annotated[str | None, typer.Option(help="Key of the text; dots go into nested records.")] = None,
    subset_key: Annotated[str | None, typer.Option(help="Key of the subset name.")] = None,
    text_format: FormatOption = None,
    text_unit: TextUnitOption = None,
    preset: PresetOption = None,
    on_error: OnErrorOption = None,
    no_eod: Annotated[bool, typer.Option("--no-eod", help="Append no end-of-document token.")] = False,
    subset: Annotated[
        list[str] | None,
        typer.Option("--subset", help="Ingest only this subset; may be repeated. Others are counted as filtered."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Records are conversations: template of what is read, as in '{prompt}' or 'Q: {question} A: '.",
            metavar="TEMPLATE",
        ),
    ] = None,
    response: Annotated[
        str | None, typer.Option(help="Template of what is to be said, as in '{response}'.", metavar="TEMPLATE")
    ] = None,
    messages: Annotated[
        str | None, typer.Option(help="Key of a list of messages with role and content.", metavar="KEY")
    ] = None,
    sentences: Annotated[
        str | None,
        typer.Option(help="Divide documents into sentences by the rules of this language, for BERT.", metavar="LANG"),
    ] = None,
    max_rejects: Annotated[
        float | None,
        typer.Option(
            help="With --on-error quarantine: fail if more records are bad. Below 1: a share of all lines, as in 0.001."
        ),
    ] = None,
    engine: Annotated[
        Literal["auto", "fastokens", "gigatoken", "tiktoken", "pieces", "tokenizers"] | None,
        typer.Option(help="What runs the tokenizer; the ids are the same. Default: auto."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes, one thread each. Default: one per core.")
    ] = None,
    shard_tokens: Annotated[int | None, typer.Option(help="Tokens in a shard.")] = None,
    part_bytes: Annotated[
        int | None, typer.Option(help="Input on disk that one worker, machine or task does by itself, in bytes.")
    ] = None,
    executor: Annotated[
        Literal["local", "ray", "dask"] | None, typer.Option(help="Who runs the parts. Default: local processes.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Address of the Ray or Dask cluster. Default: one on this machine.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="With --world: number of this machine, from 0; it does its share of the parts."),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(help="Machines that ingest into one shared folder; the one that finishes last completes it."),
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    output: OutputOption = None,
    track: TrackOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tokenize text into .bin/.idx shards, byte-compatible with Megatron-LM's.

    Every record is accounted for: lines = documents + empty + filtered + rejected.

    A killed run goes on at its last finished shards. The bytes do not depend on workers, machines or clusters.

    Example: [bold]shardline ingest --source pile/*.jsonl.zst --tokenizer tokenizer --output dataset[/bold]

    On four machines: [bold]shardline ingest ... --output /shared/dataset --rank R --world 4[/bold] with R = 0 to 3.
    """
    from preprocessing.config import IngestConfig
    from preprocessing.stages import INGEST

    where = store_at(store, output)
    inputs, paths = corpus_among(source, where)
    found = artifact_at(tokenizer, where, ("tokenizer",)) if tokenizer is not None else None
    if found is not None:
        inputs["tokenizer"] = found
    turns = {"prompt": prompt, "response": response, "messages": messages}
    flags = {
        "sources": paths,
        "tokenizer": tokenizer if found is None else None,
        "text_key": text_key,
        "subset_key": subset_key,
        "format": text_format,
        "text_unit": text_unit,
        "preset": preset,
        "on_error": on_error,
        "append_eod": False if no_eod else None,
        "subsets": subset,
        "sentences": sentences,
        "turns": {name: text for name, text in turns.items() if text is not None} or None,
        "max_rejects": max_rejects,
        "engine": engine,
        "workers": workers,
        "shard_tokens": shard_tokens,
        "part_bytes": part_bytes,
        "executor": executor,
        "cluster": cluster,
    }
    settings = settings_of(IngestConfig, "ingest", config, overrides, flags)
    if rank is not None or world is not None:
        _ingest_share(settings, inputs, where, rank=rank, world=world, as_json=as_json)
        return
    hints = [
        "next: shardline inspect {path}",
        "      shardline pretrain --from RUN --sft --dataset {path} --output tuned"
        if settings.turns is not None
        else "      shardline pretrain --dataset {path} --output run   (settings: shardline schema pretrain --text)",
    ]
    run_one(INGEST, settings, where, inputs=inputs, as_json=as_json, track=track, hints=hints)


def _ingest_share(
    settings: "IngestConfig",
    inputs: dict[str, Artifact],
    store: ArtifactStore,
    *,
    rank: int | None,
    world: int | None,
    as_json: bool,
) -> None:
    from flows.terminal import TerminalProgress, error_console
    from preprocessing.ingestion.ranks import ingest_share

    if rank is None or world is None:
        raise ConfigError("--rank and --world belong together: --rank 0 --world 4 is the first of four machines.")
    label = store.output.resolve().name if store.output is not None else "ingest"
    with TerminalProgress("ingest", error_console()) as progress:
        artifact = ingest_share(settings, inputs, store, rank=rank, world=world, label=label, progress=progress)
    if as_json:
        path = None if artifact is None else str(artifact.path)
        show({"rank": rank, "world": world, "is_complete": artifact is not None, "path": path})
    elif artifact is None:
        print(f"rank {rank} of {world} is done; parts of other ranks are not. The last rank completes the dataset.")
    else:
        print(f"{artifact.path}  (complete; fingerprint {artifact.fingerprint[:12]})")


def index(
    dataset: Datasets = None,
    weights: Annotated[
        list[float] | None, typer.Option(help="Weight of each dataset in the blend.", metavar="W...")
    ] = None,
    epochs: Annotated[
        list[float] | None, typer.Option(help="How often each dataset is read, in place of weights.", metavar="E...")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens to read of each dataset, in place of weights.", metavar="N...")
    ] = None,
    subset: Annotated[
        list[str] | None,
        typer.Option(help="Blend these subsets of the one dataset, as if each were one.", metavar="NAME..."),
    ] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens the model sees in one sample.")] = None,
    samples: Annotated[int | None, typer.Option(help="Training samples.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the order.")] = None,
    split: Annotated[str | None, typer.Option(help="Weights of train, valid, test, as in 949,50,1.")] = None,
    split_by: Annotated[
        Literal["position", "hash"] | None,
        typer.Option(help="position: as Megatron-LM; hash: stable when data are appended. Default: position."),
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build the sample indices of a dataset or a blend, bit-identical to Megatron-LM's.

    Example: [bold]shardline index --dataset dataset --seq-length 2048 --samples 100000 --split 949,50,1 -o index[/bold]
    """
    from preprocessing.config import IndexConfig
    from preprocessing.stages import INDEX

    where = store_at(store, output)
    inputs, paths = datasets_among(dataset, where)
    flags = {
        "datasets": paths,
        "weights": weights,
        "epochs": epochs,
        "tokens": tokens,
        "subsets": subset,
        "seq_length": seq_length,
        "samples": samples,
        "seed": seed,
        "split": split,
        "split_by": split_by,
    }
    settings = settings_of(IndexConfig, "index", config, overrides, flags)
    run_one(INDEX, settings, where, inputs=inputs, as_json=as_json)
