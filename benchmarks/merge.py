"""CPU time of merging two datasets against appending document by document.

    python benchmarks/merge.py [--documents 2000000] [--repeats 3]

The loop does what Megatron-LM's builder does for one document after the other (add_item,
end_document, finalize; less torch): copy its tokens, write them, note its length, and at the end
write the index. `merge_pairs` copies inside the kernel and joins the indices in chunks. Both run in
fresh processes, in turn; time is user and system, less that of a process that only imports the same
modules; the files must be equal. The stage reads the result once more for its digests, which the
last figure adds. Of long documents the copied bytes are nearly all of the work, for both.
"""

import argparse
import filecmp
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from ingest import cpu_seconds, provenance

RESULTS = Path(__file__).parent / "results" / "merge.jsonl"
SHORT_TOKENS, LONG_TOKENS = 20, 400  # messages; web pages and papers

IMPORTS = """
import struct, sys
from pathlib import Path
import numpy as np
from contracts.digests import sha256_of
from contracts.progress import SilentProgress
from preprocessing.dataset.indexed_dataset import IndexedDataset
from preprocessing.dataset.merge import merge_pairs
pairs = [IndexedDataset(path) for path in sys.argv[1:3]]
target = Path(sys.argv[3])
"""

LOOP = (
    IMPORTS
    + """
lengths, bounds = [], [0]
with open(f"{target}.bin", "wb") as out:
    for pair in pairs:
        for number in range(pair.num_documents):
            for sequence in range(pair.document_bounds[number], pair.document_bounds[number + 1]):
                tokens = np.array(pair.sequence(sequence), dtype=np.uint16)
                out.write(tokens.tobytes(order="C"))
                lengths.append(tokens.size)
            bounds.append(len(lengths))
with open(f"{target}.idx", "wb") as index:
    index.write(struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, len(lengths), len(bounds)))
    sizes = np.array(lengths, dtype=np.int32)
    index.write(sizes.tobytes())
    pointers, at = [], 0
    for length in lengths:
        pointers.append(at)
        at += length * 2
    index.write(np.array(pointers, dtype=np.int64).tobytes())
    index.write(np.array(bounds, dtype=np.int64).tobytes())
"""
)
MERGE = IMPORTS + "merge_pairs(pairs, target, progress=SilentProgress())\n"
DIGEST = IMPORTS + 'merge_pairs(pairs, target, progress=SilentProgress())\nsha256_of(Path(f"{target}.bin"))\n'

MAKE = """
import sys
from pathlib import Path
import numpy as np
from preprocessing.dataset.indexed_dataset import PairWriter
for number in (1, 2):
    random = np.random.default_rng(number)
    lengths = np.maximum(1, random.lognormal(np.log({mean}) - 0.5, 1, {documents}).astype(np.int64))
    writer = PairWriter(Path(sys.argv[number]), np.dtype("<u2"))
    writer.append(random.integers(0, 50000, int(lengths.sum()), dtype=np.uint16), lengths)
    writer.finish()
"""


def measure(folder: Path, documents: int, mean_tokens: int, repeats: int) -> dict[str, Any]:
    """Run both in turn; return their times and ratios."""
    folder.mkdir()
    sources = [str(folder / "a"), str(folder / "b")]
    cpu_seconds(MAKE.format(mean=mean_tokens, documents=documents // 2), sources)
    times: dict[str, list[float]] = {"start": [], "loop": [], "merge": [], "merge_and_digest": []}
    for _ in range(repeats):
        for name, code in zip(times, (IMPORTS, LOOP, MERGE, DIGEST), strict=True):
            times[name].append(cpu_seconds(code, [*sources, str(folder / name)]))
        for suffix in (".bin", ".idx"):
            if not filecmp.cmp(folder / f"loop{suffix}", folder / f"merge{suffix}", shallow=False):
                raise SystemExit(f"loop and merge wrote different {suffix} files")
    start = min(times["start"])
    net = {name: max(1e-3, statistics.median(values) - start) for name, values in times.items() if name != "start"}
    return {
        "benchmark": "merge",
        "documents": documents,
        "mean_tokens": mean_tokens,
        "megabytes": round((folder / "merge.bin").stat().st_size / 1e6, 1),
        **{f"{name}_cpu_s": [round(value, 3) for value in values] for name, values in times.items()},
        "ratio": round(net["loop"] / net["merge"], 1),
        "ratio_with_digest": round(net["loop"] / net["merge_and_digest"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2_000_000, help="documents of both datasets together")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for mean_tokens, documents in ((SHORT_TOKENS, options.documents), (LONG_TOKENS, options.documents // 10)):
            result = measure(Path(folder) / str(mean_tokens), documents, mean_tokens, options.repeats)
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**result, **provenance()}) + "\n")
            print(
                f"merge: {documents} documents of {mean_tokens} tokens, {result['megabytes']} MB; "
                f"{result['ratio']:.0f}x less CPU than document by document (goal 30), "
                f"{result['ratio_with_digest']:.0f}x with the digest of the result"
            )


if __name__ == "__main__":
    sys.exit(main())
