"""The ingest stage: a corpus becomes `.bin`/`.idx` shards."""
