"""The stages of this package. Importing it is cheap: heavy packages load when a stage runs."""

from preprocessing.ingest import INGEST

__all__ = ["INGEST"]
