"""From the sources a user names to parsed records: files, compression, blocks, records."""
