"""The command that leaves documents out of a corpus: clean."""

from typing import Annotated

import typer

from flows.commands.data import FormatOption, OnErrorOption, PresetOption, Sources, TextUnitOption, corpus_among
from flows.options import (
    ConfigOption,
    JsonOption,
    OutputOption,
    SetOption,
    StoreOption,
    TrackOption,
    settings_of,
    store_at,
)
from flows.single_stage import run_one


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(rich_help_panel="One stage")(clean)


def clean(
    source: Sources = None,
    quality: Annotated[
        list[str] | None,
        typer.Option(
            help="Rules of quality, gopher or c4, with the thresholds of their papers, for English web pages.",
            metavar="NAME...",
        ),
    ] = None,
    language: Annotated[
        list[str] | None,
        typer.Option(help="Keep documents in these languages only (ISO 639-1).", metavar="CODE..."),
    ] = None,
    decontaminate: Annotated[
        list[str] | None,
        typer.Option(help="Evaluation sets: documents that share n-grams with them go.", metavar="PATH..."),
    ] = None,
    ngram: Annotated[
        int | None, typer.Option(help="Words in an n-gram of --decontaminate. Default: 13; 8 finds more.")
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Of documents with the same text, keep the first.")] = False,
    minhash: Annotated[
        float | None,
        typer.Option(help="Of documents at least this similar (0.75), keep the first. See -s minhash.KEY=VALUE."),
    ] = None,
    mask_personal_data: Annotated[
        bool, typer.Option("--mask-personal-data", help="Replace e-mail addresses and public IP addresses.")
    ] = False,
    min_characters: Annotated[int | None, typer.Option(help="Leave shorter documents out.")] = None,
    max_characters: Annotated[int | None, typer.Option(help="Leave longer documents out.")] = None,
    text_key: Annotated[str | None, typer.Option(help="Key of the text; dots go into nested records.")] = None,
    subset_key: Annotated[str | None, typer.Option(help="Key of the subset name.")] = None,
    text_format: FormatOption = None,
    text_unit: TextUnitOption = None,
    preset: PresetOption = None,
    on_error: OnErrorOption = None,
    max_rejects: Annotated[
        float | None,
        typer.Option(help="With --on-error quarantine: fail if more records are bad (a count, or a share below 1)."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes. Default: one per core.")] = None,
    part_bytes: Annotated[int | None, typer.Option(help="Input on disk that one worker does by itself.")] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    output: OutputOption = None,
    track: TrackOption = False,
    as_json: JsonOption = False,
) -> None:
    """Leave documents out of a corpus: each step optional, counted, its documents listed in dropped.parquet.

    Steps, in this order: length, quality, language, evaluation sets, exact and near duplicates, personal data.

    Of a corpus artifact the held-out part is kept as it is, and is an evaluation set itself.

    Example: [bold]shardline clean --source corpus --quality gopher --exact --minhash 0.75 --output clean[/bold]
    """
    from preprocessing.cleaning.config import CleanConfig
    from preprocessing.stages import CLEAN

    where = store_at(store, output)
    inputs, paths = corpus_among(source, where)
    flags = {
        "sources": paths,
        "quality": quality,
        "languages": language,
        "decontaminate": decontaminate,
        "ngram": ngram,
        "exact": exact or None,
        "mask_personal_data": mask_personal_data or None,
        "min_characters": min_characters,
        "max_characters": max_characters,
        "text_key": text_key,
        "subset_key": subset_key,
        "format": text_format,
        "text_unit": text_unit,
        "preset": preset,
        "on_error": on_error,
        "max_rejects": max_rejects,
        "workers": workers,
        "part_bytes": part_bytes,
    }
    similar = [] if minhash is None else [f"minhash.threshold={minhash}"]
    settings = settings_of(CleanConfig, "clean", config, [*(overrides or []), *similar], flags)
    hints = [
        "left out: {path}/dropped.parquet",
        "next: shardline ingest --source {path} --tokenizer TOKENIZER --output dataset",
    ]
    run_one(CLEAN, settings, where, inputs=inputs, as_json=as_json, track=track, hints=hints)
