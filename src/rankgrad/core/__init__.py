"""What losses, metrics and relaxed sorts share: lists (padding), gains, noise, sinkhorn; explain has what their parameters mean."""
