"""The Transformer encoder on lists laid end to end: gather, attention, and what stands between its products (fused)."""
