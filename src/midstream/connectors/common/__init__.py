"""What several connectors share: writers on the I/O pool, readers over batches, malformed records, file systems."""
