"""The stages of this package. Importing it is cheap: heavy packages load when a stage runs."""

from preprocessing.cleaning.clean import CLEAN
from preprocessing.corpus.gather import CORPUS
from preprocessing.dataset.importing import IMPORT
from preprocessing.dataset.merge import MERGE
from preprocessing.dataset.split import SPLIT
from preprocessing.ingestion.ingest import INGEST
from preprocessing.samples.index import INDEX
from preprocessing.tokenization.training import TOKENIZER

__all__ = ["CLEAN", "CORPUS", "IMPORT", "INDEX", "INGEST", "MERGE", "SPLIT", "TOKENIZER"]
