"""What several connectors share: writers on the I/O pool, rolling files, readers over batches, malformed records, file systems."""
