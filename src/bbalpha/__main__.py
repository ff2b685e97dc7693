"""`python -m bbalpha`: the command line."""

from bbalpha.cli import main

if __name__ == "__main__":
    main()
