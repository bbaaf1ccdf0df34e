"""Commands on finished datasets: import, merge, split, sample."""

import contextlib
from pathlib import Path
from typing import Annotated, Literal

import typer

from contracts.errors import ConfigError
from flows.options import (
    ConfigOption,
    JsonOption,
    OutputOption,
    SetOption,
    StoreOption,
    settings_of,
    show,
    store_at,
)
from flows.references import artifact_at
from flows.single_stage import Datasets, datasets_among, holds_pairs, run_one

OneDataset = Annotated[
    str, typer.Argument(help="Dataset artifact, or prefix of .bin/.idx, or a folder of them.", metavar="DATASET")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("import", rich_help_panel="Datasets")(import_)
    for command in (merge, split, sample):
        app.command(rich_help_panel="Datasets")(command)


def import_(
    source: Annotated[
        list[str] | None,
        typer.Option("--source", help="Prefixes of .bin/.idx, .ds files, or folders of them.", metavar="PATH..."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="The tokenizer that made them: kept, and every id checked.", metavar="PATH")
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take over a dataset that Megatron-LM, GPT-NeoX or datatrove wrote.

    Tokens are copied as they are; every id is checked, the index is written anew.

    Example: [bold]shardline import --source pile_text_document --tokenizer gpt2/tokenizer.json -o dataset[/bold]
    """
    from preprocessing.dataset.config import ImportConfig
    from preprocessing.stages import IMPORT

    where = store_at(store, output)
    found = artifact_at(tokenizer, where, ("tokenizer",)) if tokenizer is not None else None
    inputs = {} if found is None else {"tokenizer": found}
    flags = {"sources": source, "tokenizer": tokenizer if found is None else None}
    settings = settings_of(ImportConfig, "import", config, overrides, flags)
    run_one(IMPORT, settings, where, inputs=inputs, as_json=as_json, hints=["next: shardline inspect {path}"])


def merge(
    dataset: Datasets = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Join datasets (or the shards of one) into one .bin/.idx, in constant memory.

    Example: [bold]shardline merge --dataset dataset-a dataset-b --output merged[/bold]
    """
    from preprocessing.dataset.config import MergeConfig
    from preprocessing.stages import MERGE

    where = store_at(store, output)
    inputs, paths = datasets_among(dataset, where)
    settings = settings_of(MergeConfig, "merge", config, overrides, {"datasets": paths})
    run_one(MERGE, settings, where, inputs=inputs, as_json=as_json)


def split(
    dataset: OneDataset,
    by: Annotated[
        Literal["hash", "position", "subset"] | None,
        typer.Option(help="What decides the side of a document. Default: its hash."),
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Shares of train, valid, test. Default: 98,1,1.")] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Only this part (or subset); may be repeated. Default: every part.", metavar="NAME"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the division by hash.")] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder in which each part gets a folder of its name.", metavar="DIR"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Divide a dataset into train, valid and test, or into its subsets; whole documents each.

    By hash a document stays on its side when data are appended or reordered.

    Example: [bold]shardline split dataset --weights 98,1,1 --output parts[/bold]
    """
    from preprocessing.dataset.config import SplitConfig
    from preprocessing.stages import SPLIT

    where = store_at(store)
    found = None if holds_pairs(dataset) else artifact_at(dataset, where, ("dataset",))
    inputs = {} if found is None else {"dataset": found}
    flags = {"dataset": dataset if found is None else None, "by": by, "weights": weights, "seed": seed}
    base = settings_of(SplitConfig, "split", config, overrides, {**flags, "part": "?" if by == "subset" else None})
    if output is not None and output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is a file; a folder is needed, in which each part gets a folder.")
    names = part or _parts(base.by, base.weights, str(found.path) if found is not None else dataset)
    for name in names:
        settings = settings_of(SplitConfig, "split", config, overrides, {**flags, "part": name})
        place = None if output is None else output / _folder_name(name)
        try:
            run_one(SPLIT, settings, store_at(store, place), inputs=inputs, as_json=as_json)
        finally:
            if output is not None:
                with contextlib.suppress(OSError):  # succeeds where a refusal left it empty
                    output.rmdir()


def _parts(by: str, weights: str, dataset: str) -> list[str]:
    """Name the parts of a division that have any width, or all subsets."""
    from preprocessing.dataset.token_dataset import TokenDataset
    from preprocessing.ingestion.encoding import NO_SUBSET
    from preprocessing.samples.splits import SPLITS, parse_split

    if by != "subset":
        return [name for name, bounds in zip(SPLITS, parse_split(weights), strict=True) if bounds is not None]
    names = TokenDataset(dataset).column("subset")
    if names is None:
        raise ConfigError(f"{dataset} has no documents.parquet that names subsets.")
    return sorted({name or NO_SUBSET for name in set(names)})


def _folder_name(part: str) -> str:
    """Return a folder's name for a part; subsets may hold slashes and spaces."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in part).strip(".") or "_"


def sample(
    dataset: OneDataset,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Documents to show, chosen at random.")] = 5,
    document: Annotated[
        list[int] | None, typer.Option(help="Show this document (from 0); may be repeated.", metavar="N")
    ] = None,
    subset: Annotated[str | None, typer.Option(help="Of this subset only.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each document to show.")] = 200,
    ids: Annotated[bool, typer.Option("--ids", help="Also print the token ids.")] = False,
    seed: Annotated[int, typer.Option(help="Another seed shows other documents.")] = 0,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show documents of a dataset as text, with the file and line each came from.

    Example: [bold]shardline sample dataset -n 3 --subset Github[/bold]
    """
    from preprocessing.dataset.documents import choose_documents, show_documents
    from preprocessing.dataset.token_dataset import TokenDataset

    where = store_at(store)
    found = None if holds_pairs(dataset) else artifact_at(dataset, where, ("dataset",))
    opened = TokenDataset(dataset if found is None else found.path)
    numbers = document or choose_documents(opened, count, seed=seed, subset=subset)
    shown = list(show_documents(opened, numbers, max_tokens=max_tokens))
    if as_json:
        show({"dataset": str(opened.path), "documents": [item.as_dict() for item in shown]})
        return
    for item in shown:
        place = f"{item.file}:{item.line}" if item.file is not None else "source unknown"
        more = "" if len(item.ids) == item.tokens else f" (the first {len(item.ids)} shown)"
        print(f"document {item.document}  {place}  {item.subset or '-'}  {item.tokens} tokens{more}")
        if ids or item.text is None:
            print("  " + " ".join(map(str, item.ids)))
        if item.text is not None:
            print("  " + item.text.replace("\n", "\n  "))
