"""Lists of up to 256 documents, the matrix in registers: launch, then sort, rounds, gradient over one workspace."""
