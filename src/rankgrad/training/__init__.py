"""From a configuration and lists to trained weights; nothing here knows of run folders.

In the order data flows: config, build (network: one of the caller's own), data, start, loop (state, step, readback, evaluate)
and, for speed, execution, cuda_graph, warmup, step_rng, precision, threads (paces, openmp, one_order), distributed. Importing this package imports neither torch nor numpy; its modules do.
"""
