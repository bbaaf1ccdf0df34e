"""One rank of an evaluation: `python -m evaluation.ranks JOB.json`, started by the launcher.

The heavy imports come after the log is open, so that their errors are kept too.
"""

from pathlib import Path

from training.launch import rank_main


def main(arguments: list[str]) -> None:
    """Score the rows of the job whose path is the first argument."""
    from evaluation.rank_scoring import score_job

    score_job(Path(arguments[0]))


if __name__ == "__main__":
    rank_main(main)
