"""NeuralNDCG: short lists in Triton (short) or CUDA C++ clusters (hopper), lists of any length tile by tile (long)."""
