"""Nothing in a checkpoint is run, nothing half-written counts, and memory stays bounded."""

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap

import pytest
from conversion_cases import convert, random_model, write_random
from whole_checkpoint import whole_tensors

from contracts.errors import InputError
from conversion.catalogue import equal_bits
from conversion.config import ReshapeConfig
from conversion.native import NativeCatalogue
from training.safe_pickle import read_dcp_metadata
from training.step_folders import find_latest


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_code_in_metadata_is_refused_and_not_run(tmp_path):
    source = write_random(tmp_path / "source", random_model("gpt2"))
    (source / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    # The manifest of a stranger fits its own files.
    manifest = (source / "manifest.json").read_text()
    size = (source / ".metadata").stat().st_size
    data = json.loads(manifest)
    data["files"][".metadata"]["bytes"] = size
    (source / "manifest.json").write_text(json.dumps(data))

    with pytest.raises(InputError, match=r"\.metadata.*names posix\.mkdir"):
        convert(source, tmp_path / "target")

    assert not (tmp_path / "owned").exists() and not (tmp_path / "target").exists()


def test_metadata_that_leads_out_of_the_folder_is_refused(tmp_path):
    source = write_random(tmp_path / "source", random_model("gpt2"))
    metadata = read_dcp_metadata(source)
    for info in metadata.storage_data.values():
        object.__setattr__(info, "relative_path", "../elsewhere.distcp")
    (source / ".metadata").write_bytes(pickle.dumps(metadata))

    with pytest.raises(InputError, match="which is no plain file name"):
        NativeCatalogue(source)


def test_a_flipped_bit_in_the_source_is_found(tmp_path):
    source = write_random(tmp_path / "source", random_model("gpt2"))
    data = bytearray((source / "__0_0.distcp").read_bytes())
    data[2000] ^= 1
    (source / "__0_0.distcp").write_bytes(data)

    with pytest.raises(InputError, match=r"__0_0\.distcp: is damaged \(its sha256"):
        convert(source, tmp_path / "target")

    assert not list((tmp_path / "target").glob("*"))


KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    import conversion.huggingface_writing, conversion.native_writing
    from contracts.store import ArtifactStore
    from conversion.config import ReshapeConfig
    from conversion.stage import stage_for

    count = 0

    def dies_in_the_third(write):
        def wrapped(*arguments):
            global count
            count += 1
            if count == 3:
                path = next(a for a in arguments if isinstance(a, Path))
                path.with_name(path.name + ("" if path.suffix == ".distcp" else ".tmp")).write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*arguments)
        return wrapped

    target = conversion.native_writing.NativeTarget
    target._write_rank = dies_in_the_third(target._write_rank)
    conversion.huggingface_writing.write_file = dies_in_the_third(conversion.huggingface_writing.write_file)
    settings = ReshapeConfig.model_validate_json(sys.argv[1])
    output = Path(sys.argv[2])
    stage_for(settings).run(settings, store=ArtifactStore(output.parent / "store", output=output))
    """
)


@pytest.mark.parametrize(
    "settings",
    [{"tensor_parallel": 2, "pipeline_parallel": 2}, {"to": "huggingface", "shard_bytes": 30_000}],
    ids=["native", "huggingface"],
)
def test_a_reshape_killed_in_the_middle_goes_on_and_ends_as_if_nothing_had_happened(tmp_path, settings):
    source = write_random(tmp_path / "source", random_model("gpt2"))
    config = ReshapeConfig(checkpoint=str(source), workers=1, **settings)
    target = tmp_path / "target"

    process = subprocess.run(
        [sys.executable, "-c", KILLED, config.model_dump_json(), str(target)], check=False, timeout=120
    )

    assert process.returncode == -signal.SIGKILL
    assert not (target / "manifest.json").exists()
    assert find_latest(target) == (None, [])
    finished = {path: path.stat().st_ino for path in target.rglob("*") if path.suffix in (".distcp", ".safetensors")}
    finished = {path: node for path, node in finished.items() if path.read_bytes() != b"half"}
    assert len(finished) == 2

    resumed = convert(source, target, workers=1, **settings)
    fresh = convert(source, tmp_path / "fresh", **settings)

    assert resumed.manifest.content == fresh.manifest.content
    kept = {path.stat().st_ino for path in target.rglob("*") if path.is_file()}
    assert set(finished.values()) <= kept, "what was finished is not written again"
    assert not list(target.rglob("*.tmp")) and not list(target.rglob("*.distcp.json"))


MEASURED = textwrap.dedent(
    """
    import sys, threading
    from pathlib import Path
    import torch, torch.distributed.checkpoint
    import conversion.reshape
    from contracts.store import ArtifactStore
    from conversion.config import ReshapeConfig
    from conversion.stage import stage_for

    def anonymous_bytes():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes())

    settings = ReshapeConfig.model_validate_json(sys.argv[1])
    output = Path(sys.argv[2])
    before, done = anonymous_bytes(), threading.Event()
    peak = [before]
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        stage_for(settings).run(settings, store=ArtifactStore(output.parent / "store", output=output))
    finally:
        done.set()
        thread.join()
    print(peak[0] - before)
    """
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("settings", [{"tensor_parallel": 2}, {"to": "huggingface"}], ids=["native", "huggingface"])
def test_memory_above_the_interpreter_is_bounded_by_the_largest_tensor(tmp_path, settings):
    # 280 MB with moments; no tensor has more than 4 MiB.
    model = random_model("gpt2", num_layers=7, hidden_size=512, num_attention_heads=8)
    source = write_random(tmp_path / "source", model)
    assert (source / "__0_0.distcp").stat().st_size > 250e6
    config = ReshapeConfig(checkpoint=str(source), **settings)

    limit, peaks = (64 + 2 * 4) * 2**20, []
    # On a loaded machine the allocator keeps more or less of what threads gave back; one run below will do.
    while len(peaks) < 3 and min(peaks, default=limit) >= limit:
        process = subprocess.run(
            [sys.executable, "-c", MEASURED, config.model_dump_json(), str(tmp_path / f"target{len(peaks)}")],
            check=True,
            timeout=300,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        peaks.append(int(process.stdout))

    assert min(peaks) < limit


def test_every_bit_of_a_resumed_result_is_the_sources(tmp_path):
    source = write_random(tmp_path / "source", random_model("llama"))
    target = tmp_path / "target"
    config = {"tensor_parallel": 2, "data_parallel": 2}
    convert(source, target, **config)
    (target / "manifest.json").unlink()

    again = convert(source, target, **config)

    a, b = whole_tensors(source), whole_tensors(again.path / "step-00000007")
    assert a.keys() == b.keys() and all(equal_bits(a[name], b[name]) for name in a)
