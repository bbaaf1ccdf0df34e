"""The stages of this package. Importing it is cheap: heavy packages load when a stage runs."""

from preprocessing.corpus.gather import CORPUS
from preprocessing.ingestion.ingest import INGEST
from preprocessing.samples.index import INDEX
from preprocessing.tokenization.training import TOKENIZER

__all__ = ["CORPUS", "INDEX", "INGEST", "TOKENIZER"]
