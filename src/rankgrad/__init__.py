"""rankgrad: train ranking models on the metric itself."""

__version__ = "0.1.0"
