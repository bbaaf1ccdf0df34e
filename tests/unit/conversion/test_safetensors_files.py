"""safetensors headers are read with suspicion."""

import json

import pytest
import safetensors.torch
import torch

from contracts.errors import InputError
from conversion.catalogue import TensorEntry
from conversion.safetensors_files import SafetensorsCatalogue, read_header, split_into_files, write_file


def write_raw(path, header, data=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start, stop, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "size", "reason"),
    [
        ({"a": entry(0, 8)}, 4, "is cut off"),
        ({"a": entry(0, 8)}, 12, "belong to no tensor"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "does not begin where"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "does not begin where"),
        ({"a": entry(0, 12)}, 12, "needs 8 bytes and has 12"),
        ({"a": entry(8, 0)}, 8, "needs 8 bytes"),
        ({"a": entry(0, 8, dtype="F8")}, 8, "unknown type 'F8'"),
        ({"a": entry(-8, 0)}, 8, "no whole number"),
        ({"a": entry(0, 8, shape=(2.0,))}, 8, "no whole number"),
        ({"a": 3}, 8, "damaged"),
        (b'{"a": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}, "a": 1}', 0, "twice"),
        (b"[1]", 0, "damaged"),
        (b"no json", 0, "damaged"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path, header, size, reason):
    path = write_raw(tmp_path / "model.safetensors", header, bytes(size))

    with pytest.raises(InputError, match=reason) as error:
        read_header(path)

    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\x01", (2**63).to_bytes(8, "little"), (50).to_bytes(8, "little") + b"{}"])
def test_a_file_too_short_for_its_header_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)

    with pytest.raises(InputError, match=r"model\.safetensors"):
        read_header(path)


def test_what_is_written_in_pieces_is_read_by_the_library_and_by_us(tmp_path):
    tensors = {"w": torch.randn(5, 3), "b": torch.randn(7).bfloat16(), "empty": torch.empty(0, 4)}
    entries = {name: TensorEntry(name, tuple(t.shape), t.dtype) for name, t in tensors.items()}
    path = tmp_path / "model.safetensors"

    write_file(path, entries, {"format": "pt"}, lambda e: iter(tensors[e.name].split(2)))

    library = safetensors.torch.load_file(path)
    stored, metadata = read_header(path)
    ours = SafetensorsCatalogue(stored)
    assert metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        assert torch.equal(library[name], tensor)
        assert torch.equal(ours.read(name, entries[name].box), tensor)


def test_files_hold_at_most_shard_bytes_unless_one_tensor_is_larger():
    sizes = {"a": 10, "b": 10, "c": 100, "d": 1}
    entries = {name: TensorEntry(name, (size,), torch.uint8) for name, size in sizes.items()}

    files = split_into_files(entries, 20)

    assert [list(file) for file in files] == [["a", "b"], ["c"], ["d"]]
