"""Room 1, data: from files to batches. Imports nothing else of rankgrad."""
