"""Says which rows of a canonical tensor are which rows of a foreign one, and reads either through the other.

A `Link` is written once per pair of tensors; `derive_foreign` and `derive_canonical` turn the
links of a model into readers for the two directions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conversion.catalogue import Box, Catalogue, Shape, TensorEntry
from conversion.file_reading import empty_box


@dataclass(frozen=True)
class Run:
    """Consecutive rows that stay together: where they begin in either tensor."""

    canonical: int
    foreign: int
    count: int


@dataclass(frozen=True)
class Link:
    """Rows that a canonical and a foreign tensor have in common.

    Args:
        canonical: Canonical name.
        foreign: Name in the other format.
        foreign_shape: As stored there.
        runs: Which rows correspond; in the transposed foreign tensor if `is_transposed`.
        is_transposed: The foreign format stores a matrix as (in, out).
    """

    canonical: str
    foreign: str
    foreign_shape: Shape
    runs: tuple[Run, ...]
    is_transposed: bool = False


@dataclass(frozen=True)
class _Piece:
    source: str
    first: int  # in the source
    at: int  # in the result
    count: int


@dataclass(frozen=True)
class _Recipe:
    entry: TensorEntry
    pieces: tuple[_Piece, ...]
    is_source_transposed: bool = False
    is_result_transposed: bool = False


class LinkedCatalogue:
    """Tensors that are read through the rows of another catalogue's; rows without a source are zero."""

    def __init__(self, source: Catalogue, recipes: Iterable[_Recipe]) -> None:
        self._source = source
        self._recipes = {recipe.entry.name: recipe for recipe in recipes}
        self._entries = {name: recipe.entry for name, recipe in self._recipes.items()}

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    def reads_whole(self, name: str) -> bool:
        """Tell whether any part of a tensor costs about as much to read as all of it (it is transposed)."""
        recipe = self._recipes.get(name)
        if recipe is None:
            return False
        if recipe.is_source_transposed or recipe.is_result_transposed:
            return True
        inner = self._source
        return isinstance(inner, LinkedCatalogue) and any(inner.reads_whole(piece.source) for piece in recipe.pieces)

    def read(self, name: str, box: Box) -> Tensor:
        recipe = self._recipes[name]
        if recipe.is_result_transposed:
            return self._rows(recipe, box[::-1]).t().contiguous()
        return self._rows(recipe, box)

    def _rows(self, recipe: _Recipe, box: Box) -> Tensor:
        (first, last), *inner = box
        pieces = [p for p in recipe.pieces if p.at < last and first < p.at + p.count]
        if len(pieces) == 1 and not recipe.is_source_transposed:
            piece = pieces[0]
            shift = piece.first - piece.at
            if piece.at <= first and last <= piece.at + piece.count:
                return self._source.read(piece.source, ((first + shift, last + shift), *inner))
        out = empty_box(box, recipe.entry.dtype)
        if sum(min(last, p.at + p.count) - max(first, p.at) for p in pieces) < last - first:
            out.zero_()
        read = self._transposed_reader(pieces, tuple(inner)) if recipe.is_source_transposed else self._source.read
        for piece in pieces:
            start, stop = max(first, piece.at), min(last, piece.at + piece.count)
            shift = piece.first - piece.at
            out[start - first : stop - first] = read(piece.source, ((start + shift, stop + shift), *inner))
        return out

    def _transposed_reader(self, pieces: Sequence[_Piece], inner: Box) -> "_TransposedRows":
        """Read the columns that the pieces need at once: one by one each would read every row of the file."""
        low = min((p.first for p in pieces), default=0)
        high = max((p.first + p.count for p in pieces), default=0)
        names = {p.source for p in pieces}
        return _TransposedRows({name: self._source.read(name, (*inner, (low, high))).t() for name in names}, low, inner)

    def close(self) -> None:
        self._source.close()


@dataclass(frozen=True)
class _TransposedRows:
    held: Mapping[str, Tensor]
    first: int
    inner: Box

    def __call__(self, name: str, box: Box) -> Tensor:
        (start, stop), *_ = box
        return self.held[name][start - self.first : stop - self.first]


def derive_foreign(source: Catalogue, links: Sequence[Link]) -> LinkedCatalogue:
    """Read the tensors of the other format out of a catalogue of canonical ones."""
    by_name: dict[str, list[Link]] = {}
    for link in links:
        by_name.setdefault(link.foreign, []).append(link)
    recipes = []
    for name, parts in by_name.items():
        dtype = source.entries[parts[0].canonical].dtype
        pieces = [_Piece(link.canonical, r.canonical, r.foreign, r.count) for link in parts for r in link.runs]
        entry = TensorEntry(name, parts[0].foreign_shape, dtype)
        recipes.append(_Recipe(entry, _in_order(pieces), is_result_transposed=parts[0].is_transposed))
    return LinkedCatalogue(source, recipes)


def derive_canonical(source: Catalogue, links: Sequence[Link], shapes: Mapping[str, Shape]) -> LinkedCatalogue:
    """Read canonical tensors out of a catalogue of the other format; padding rows of the vocabulary are zero.

    Args:
        shapes: Of the canonical tensors, in the order that they shall have.
    """
    by_name: dict[str, list[Link]] = {name: [] for name in shapes}
    for link in links:
        by_name[link.canonical].append(link)
    recipes = []
    for name, parts in by_name.items():
        dtype: torch.dtype = source.entries[parts[0].foreign].dtype
        pieces = [_Piece(link.foreign, r.foreign, r.canonical, r.count) for link in parts for r in link.runs]
        entry = TensorEntry(name, shapes[name], dtype)
        recipes.append(_Recipe(entry, _in_order(pieces), is_source_transposed=parts[0].is_transposed))
    return LinkedCatalogue(source, recipes)


def derive_resized(
    source: Catalogue, shapes: Mapping[str, Shape], *, kept_rows: Mapping[str, int] | None = None
) -> LinkedCatalogue:
    """Read tensors with more or fewer rows than the source has; new rows are zero.

    Args:
        shapes: New shapes of those tensors that change.
        kept_rows: Rows that are taken over, of those tensors where these are not all.
    """
    recipes = []
    for name, entry in source.entries.items():
        shape = shapes.get(name, entry.shape)
        rows = min(entry.shape[0], shape[0]) if shape else 0
        rows = min(rows, (kept_rows or {}).get(name, rows))
        recipes.append(_Recipe(TensorEntry(name, shape, entry.dtype), (_Piece(name, 0, 0, rows),)))
    return LinkedCatalogue(source, recipes)


def _in_order(pieces: Iterable[_Piece]) -> tuple[_Piece, ...]:
    return tuple(sorted(pieces, key=lambda piece: piece.at))
