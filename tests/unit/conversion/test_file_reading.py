"""Boxes of tensors are read by byte ranges."""

import pytest
import torch

from contracts.errors import InputError
from conversion.file_reading import FileReader, empty_box


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((), ()),
        ((7,), ((2, 5),)),
        ((6, 4), ((0, 6), (0, 4))),
        ((6, 4), ((1, 3), (0, 4))),
        ((6, 4), ((1, 5), (1, 3))),
        ((6, 4), ((2, 2), (0, 4))),
        ((3, 20_000), ((1, 3), (10, 20))),  # most of a row is not wanted, so pieces of rows are read
        ((4, 3, 5), ((1, 4), (1, 2), (0, 5))),
        ((3000, 200), ((5, 2900), (7, 150))),  # more than one block
    ],
)
def test_a_box_read_from_a_file_is_the_slice_of_the_tensor(tmp_path, shape, box):
    whole = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(shape)
    path = tmp_path / "data"
    path.write_bytes(b"before" + whole.numpy().tobytes())
    out = empty_box(box, torch.float32)

    with FileReader() as files:
        files.read_box(path, 6, shape, box, out)

    assert torch.equal(out, whole[tuple(slice(a, b) for a, b in box)])


def test_a_box_can_be_read_into_a_part_of_a_larger_tensor(tmp_path):
    whole = torch.arange(24.0).reshape(6, 4)
    path = tmp_path / "data"
    path.write_bytes(whole.numpy().tobytes())
    out = torch.zeros(6, 8)

    with FileReader() as files:
        files.read_box(path, 0, (6, 4), ((0, 6), (0, 4)), out[:, 4:])

    assert torch.equal(out, torch.cat((torch.zeros(6, 4), whole), dim=1))


def test_a_file_that_ends_early_is_named_with_the_byte(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(10))

    with FileReader() as files, pytest.raises(InputError, match=r"data: ends at byte 10, and 6 more"):
        files.read_box(path, 0, (4,), ((0, 4),), torch.empty(4))
