"""What the compiled reader of a block and its caller tell each other: slots of an int64 array; *_LINE count from 1."""

ROWS, ENTRIES, LINES, CLAMPED, CLAMPED_LINE, WIDEST, WIDEST_LINE, SLOTS = range(8)
SEEN = 1 << 16  # unsorted lines are checked for repeated indices below this
