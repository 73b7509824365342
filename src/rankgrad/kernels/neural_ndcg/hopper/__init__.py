"""The same lists on Hopper and later, in CUDA C++: launch compiles and starts sort.cu and rounds.cu."""
