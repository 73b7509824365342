"""Lists of any length: launch, then windows, rounds and the entries they are made of."""
