"""The Transformer encoder on packed lists: gather, attention, and what is between its products (fused, reference)."""
