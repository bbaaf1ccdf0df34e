"""`python -m start_pretrain STORE DATASET SETTINGS.json`: one pretrain stage in a process that tests can kill."""

import sys
from pathlib import Path

from contracts.artifact import read_artifact
from contracts.errors import ShardlineError
from contracts.store import ArtifactStore
from training.config import PretrainConfig
from training.stage import PRETRAIN


def main() -> int:
    store, dataset, settings = (Path(text) for text in sys.argv[1:])
    config = PretrainConfig.model_validate_json(settings.read_text(encoding="utf-8"))
    try:
        PRETRAIN.run(config, inputs={"dataset0": read_artifact(dataset)}, store=ArtifactStore(store), label="run")
    except ShardlineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
