"""Records of torch.save are read without running them."""

import io
import pickle
import zipfile

import pytest
import torch

from conversion.file_reading import FileReader
from conversion.tensor_records import read_record, write_record
from training.checkpoint_files import without_crc32


def saved(tmp_path, tensor):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"x" * 100)
        write_record(file, tensor)
    return path, path.stat().st_size - 100


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("rows", [0, 1, 500])
def test_the_data_of_a_saved_tensor_is_found(tmp_path, dtype, rows):
    tensor = torch.randn(rows, 9).to(dtype)
    with without_crc32():
        path, length = saved(tmp_path, tensor)

    with FileReader() as files:
        record = read_record(files, path, 100, length, dtype=dtype, shape=(rows, 9))
        out = torch.empty(rows, 9, dtype=dtype)
        files.read_box(path, record.start, (rows, 9), ((0, rows), (0, 9)), out)

    assert record.is_contiguous
    assert torch.equal(out, tensor)


def test_a_transposed_tensor_is_recognized(tmp_path):
    path, length = saved(tmp_path, torch.randn(4, 6).t())

    with FileReader() as files:
        record = read_record(files, path, 100, length, dtype=torch.float32, shape=(6, 4))

    assert not record.is_contiguous and record.stride == (1, 6)


def test_another_shape_or_type_than_expected_is_refused(tmp_path):
    path, length = saved(tmp_path, torch.randn(4, 6))

    with FileReader() as files:
        with pytest.raises(ValueError, match=r"\[4, 6\]"):
            read_record(files, path, 100, length, dtype=torch.float32, shape=(6, 4))
        with pytest.raises(ValueError, match="float32"):
            read_record(files, path, 100, length, dtype=torch.float64, shape=(4, 6))


class Evil:
    def __reduce__(self):
        return (open, ("/tmp/never", "w"))


def test_a_record_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "file"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil(), protocol=2))
    path.write_bytes(content.getvalue())

    with FileReader() as files, pytest.raises(pickle.UnpicklingError, match="which no tensor needs"):
        read_record(files, path, 0, len(content.getvalue()), dtype=torch.float32, shape=(1,))
