"""NeuralNDCG: lists of up to 256 documents in Triton (short) or CUDA C++ (hopper), longer ones tile by tile (long)."""
