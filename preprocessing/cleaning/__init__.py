"""The clean stage: documents left out or mended, each counted and listed."""
