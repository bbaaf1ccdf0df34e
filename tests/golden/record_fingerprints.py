"""Records the fingerprints of sample recipes: `python tests/golden/record_fingerprints.py`.

Run it only when every id is meant to change, and say so in the CHANGELOG: all stores start anew.
"""

import json
from dataclasses import asdict
from pathlib import Path

from contracts.fingerprint import Recipe

RECIPES = {
    "empty": Recipe("corpus", 1),
    "numbers": Recipe("pretrain", 2, {"lr": 3e-4, "clip": 1.0, "steps": 1000, "tiny": 1e-12, "huge": 1e20}),
    "texts": Recipe("ingest", 1, {"text_key": "text", "name": "größe", "empty": "", "none": None, "on": True}),
    "nested": Recipe("pretrain", 1, {"model": {"num_layers": 2, "sizes": [1, 2.5, [3]]}, "betas": [0.9, 0.95]}),
    "inputs": Recipe("evaluate", 3, {}, {"dataset": "0" * 32, "checkpoint": "f" * 32}, {"corpus.jsonl": "a" * 64}),
}

if __name__ == "__main__":
    cases = [{"name": n, "recipe": asdict(r), "fingerprint": r.fingerprint} for n, r in RECIPES.items()]
    target = Path(__file__).with_name("fingerprints.json")
    target.write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
