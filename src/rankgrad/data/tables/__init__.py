"""Parquet, CSV, Arrow and frames: reader, over the arrow helpers."""
