"""The stages of this package. Importing it is cheap: heavy packages load when a stage runs."""

from preprocessing.corpus import CORPUS
from preprocessing.index import INDEX
from preprocessing.ingest import INGEST
from preprocessing.tokenizer_training import TOKENIZER

__all__ = ["CORPUS", "INDEX", "INGEST", "TOKENIZER"]
