"""Tensors that are seen in others: a layer of a stack, rows of a fused matrix, a range of a flat buffer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from contracts.errors import InputError
from conversion.catalogue import Box, Catalogue, Shape, TensorEntry, box_shape, common_box, num_elements, shifted
from conversion.file_reading import empty_box


@dataclass(frozen=True)
class View:
    """A box of a tensor, and where in a stored one its elements lie.

    Args:
        at: First index of the box in every dimension of the tensor.
        shape: Of the box.
        key: Name of the stored tensor.
        lead: Its first indices, such as those of a layer and an expert.
        origin: First index in each dimension behind them; of a flat buffer one number, the first element.
        is_flat: Behind `lead` the stored tensor has one dimension, and the box lies in it row by row.
    """

    at: Shape
    shape: Shape
    key: str
    lead: Shape = ()
    origin: Shape = ()
    is_flat: bool = False

    @property
    def box(self) -> Box:
        return tuple((first, first + size) for first, size in zip(self.at, self.shape, strict=True))

    def read(self, source: Catalogue, box: Box) -> Tensor:
        """Return the elements of `box`, a part of the view's, counted in the whole tensor."""
        lead = tuple((n, n + 1) for n in self.lead)
        inside = shifted(box, self.at)
        if not self.is_flat:
            by = tuple(-n for n in self.origin)
            return source.read(self.key, (*lead, *shifted(inside, by))).reshape(box_shape(box))
        rows, *rest = inside or ((0, 1),)
        row = num_elements(self.shape[1:])
        first = self.origin[0]
        found = source.read(self.key, (*lead, (first + rows[0] * row, first + rows[1] * row)))
        found = found.reshape(rows[1] - rows[0], *self.shape[1:])
        return found[(slice(None), *(slice(a, b) for a, b in rest))].contiguous().reshape(box_shape(box))


class ViewCatalogue:
    """Tensors that are made up of views.

    Args:
        folder: For messages.
        source: Holds the stored tensors; closed with this one.
        views: Name to the views that fill it, in the order in which tensors shall have.
        shapes: Of the tensors.

    Raises:
        InputError: Views do not fill a tensor, are of several types, or reach beyond a stored tensor.
    """

    def __init__(
        self, folder: Path, source: Catalogue, views: Mapping[str, Sequence[View]], shapes: Mapping[str, Shape]
    ) -> None:
        self._source, self._views = source, views
        self._entries = {name: _entry(folder, source, name, shapes[name], found) for name, found in views.items()}

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self._entries

    def read(self, name: str, box: Box) -> Tensor:
        views = self._views[name]
        if len(views) == 1:
            return views[0].read(self._source, box)
        out = empty_box(box, self._entries[name].dtype)
        for view in views:
            common = common_box(box, view.box)
            if common is not None:
                place = tuple(slice(a, b) for a, b in shifted(common, tuple(a for a, _ in box)))
                out[place] = view.read(self._source, common)
        return out

    def close(self) -> None:
        self._source.close()


def _entry(folder: Path, source: Catalogue, name: str, shape: Shape, views: Sequence[View]) -> TensorEntry:
    if sum(num_elements(view.shape) for view in views) != num_elements(shape) or not all(
        _is_within(view.box, tuple((0, n) for n in shape)) for view in views
    ):
        raise InputError(f"{folder}: the parts of tensor {name} do not make up its shape {list(shape)}.")
    dtypes = set()
    for view in views:
        stored = source.entries[view.key]
        dtypes.add(stored.dtype)
        count = num_elements(view.shape)
        sizes = (count,) if view.is_flat else view.shape
        lead = tuple((n, n + 1) for n in view.lead)
        if not _is_within((*lead, *((a, a + n) for a, n in zip(view.origin, sizes, strict=True))), stored.box):
            raise InputError(
                f"{folder}: tensor {view.key} of shape {list(stored.shape)} ends before the part that {name} needs."
            )
    if len(dtypes) > 1:
        raise InputError(f"{folder}: the parts of tensor {name} have several types ({', '.join(map(str, dtypes))}).")
    return TensorEntry(name, shape, dtypes.pop())


def _is_within(box: Box, whole: Box) -> bool:
    return len(box) == len(whole) and all(a >= c and b <= d for (a, b), (c, d) in zip(box, whole, strict=True))
