"""CPU time of the clean stage, step by step, against what does the step called alone in memory.

    python benchmarks/clean.py [--megabytes 24] [--repeats 2]

"alone" is the rule or library over a list of texts: rensa over hashes of n-grams, py3langid over whole texts of up
to 3000 characters, the rules' functions, blake2b. The stage does all it does for a user: reads, parses
and compresses twice over, sorts, lists, publishes. Both run in fresh processes with one thread; time is that
of the process tree, user and system.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ingest import cpu_seconds, prepare, provenance

RESULTS = Path(__file__).parent / "results" / "clean.jsonl"
STEPS: dict[str, dict[str, Any]] = {
    "length": {"min_characters": 1},
    "gopher": {"quality": ["gopher"]},
    "c4": {"quality": ["c4"]},
    "language": {"languages": ["en"], "min_language_score": 0},
    "decontamination": {},
    "exact": {"exact": True},
    "minhash": {"minhash": {}},
    "mask": {"mask_personal_data": True},
}

STAGE = """
import json, sys
from pathlib import Path
from contracts.store import ArtifactStore
from preprocessing.cleaning.config import CleanConfig
from preprocessing.stages import CLEAN
source, output, settings = sys.argv[1:]
config = CleanConfig(sources=[source], workers=1, **json.loads(settings))
CLEAN.run(config, store=ArtifactStore(Path(output).parent / "store", output=Path(output)))
"""

ALONE = """
import hashlib, io, json, sys, time
from pathlib import Path
import orjson, zstandard
source, step, evaluation = sys.argv[1:]
raw = zstandard.ZstdDecompressor().stream_reader(open(source, "rb"), read_across_frames=True).read()
texts = [orjson.loads(line)["text"] for line in raw.splitlines()]
from preprocessing.cleaning import quality
from preprocessing.cleaning.config import MinHashConfig
from preprocessing.cleaning.contamination import EvaluationIndex, evaluation_keys
from preprocessing.cleaning.languages import LanguageFilter
from preprocessing.cleaning.ngrams import WordHasher, ngram_keys
from preprocessing.cleaning.personal import mask_personal_data
from preprocessing.cleaning.signatures import Signer
from preprocessing.reading.records import RecordFormat
from preprocessing.reading.source_file import SourceFile
hasher = WordHasher()
if step == "language":
    function = LanguageFilter(["en"], 0).reason
elif step == "minhash":
    signer = Signer(MinHashConfig())
    function = lambda text: signer([hasher(text)])
elif step == "decontamination":
    index = EvaluationIndex.of([evaluation_keys(SourceFile("e", Path(evaluation)), ("text",), RecordFormat(), 13)])
    function = lambda text: index.overlap(hasher(text), 13)
else:
    digest = lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest()
    rules = {"length": len, "exact": digest, "mask": mask_personal_data}
    function = {**quality.RULES, **rules}[step]
started = time.process_time()
for text in texts:
    function(text)
Path(sys.argv[1] + "." + step).write_text(str(time.process_time() - started))
"""


def evaluation_set(source: Path, folder: Path) -> Path:
    """Write passages of every hundredth document as an evaluation set."""
    import zstandard

    raw = zstandard.ZstdDecompressor().stream_reader(source.open("rb"), read_across_frames=True).read()
    texts = [json.loads(line)["text"] for line in raw.splitlines()[::100]]
    path = folder / "evaluation.jsonl"
    path.write_text("".join(json.dumps({"text": text[200:800]}) + "\n" for text in texts))
    return path


def measure(folder: Path, megabytes: float, repeats: int) -> dict[str, Any]:
    """Run each step alone and in the stage; return megabytes of text per CPU-second."""
    source, _, text_bytes = prepare(folder, megabytes)
    evaluation = evaluation_set(source, folder)
    rates: dict[str, dict[str, float]] = {}
    for step, settings in STEPS.items():
        settings = {"decontaminate": [str(evaluation)]} if step == "decontamination" else settings
        alone, stage = [], []
        for number in range(repeats):
            cpu_seconds(ALONE, [str(source), step, str(evaluation)])
            alone.append(float(Path(f"{source}.{step}").read_text()))
            stage.append(cpu_seconds(STAGE, [str(source), str(folder / f"{step}{number}"), json.dumps(settings)]))
        found = {"alone": statistics.median(alone), "stage": statistics.median(stage)}
        rates[step] = {name: round(text_bytes / 1e6 / max(seconds, 1e-3), 1) for name, seconds in found.items()}
        print(
            f"clean: {step:<16} alone {rates[step]['alone']:>8} MB/CPU-s, stage {rates[step]['stage']:>6}", flush=True
        )
    return {"benchmark": "clean", "text_megabytes": round(text_bytes / 1e6, 2), "megabytes_per_cpu_s": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=24.0, help="text to clean")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each, in turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.megabytes, options.repeats)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**result, **provenance()}) + "\n")


if __name__ == "__main__":
    main()
