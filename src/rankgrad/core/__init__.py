"""What losses, metrics and relaxed sorts share: lists (padding), gains, noise, sinkhorn."""
