"""LETOR/SVMLight text to a dataset: text (files), blocks (compiled, or line by line), matrix; reader joins them."""
