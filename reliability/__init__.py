"""Promises with a number each: what may go wrong is made to go wrong, many times, and what survived is counted.

    make chaos      processes killed, files damaged, disks full, workers lost, hostile files and names
    make nightly    fuzzing of losses, metrics and readers; large data, many fits, many threads

Both write docs/reliability.md: promise, command, tried, survived, commit. `promise` says what a promise is, `table` writes them down;
every other file keeps one room's promises. tests/reliability tries each a few times in `make test`.
"""
