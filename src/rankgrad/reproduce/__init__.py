"""The paper's tables and figures, made again: a module for each, and the sub-commands of `rankgrad reproduce`. Room 6."""
