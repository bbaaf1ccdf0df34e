"""A rank that trains on `PatternSource` instead of an index: `python -m pattern_rank JOB.json`."""

from pathlib import Path

from training_cases import PatternSource

from training.launch import rank_main
from training.rank import Job, train


def main(arguments: list[str]) -> None:
    train(Job.read(Path(arguments[0])), lambda _job, _split: PatternSource())


if __name__ == "__main__":
    rank_main(main)
