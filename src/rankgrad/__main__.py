"""`python -m rankgrad`: the command line."""

from rankgrad.cli import main

if __name__ == "__main__":
    main()
