"""What `join_table` loads tables from: files, Delta tables, functions. They are loaded as a whole, on the I/O pool."""
