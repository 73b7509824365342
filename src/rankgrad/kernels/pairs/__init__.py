"""Pairwise losses and ApproxNDCG: a summary of each list, then one pass over its pairs."""
