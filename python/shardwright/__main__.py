"""The command line: `shardwright`, or `python -m shardwright`."""

import sys

from ._native import run


def main() -> None:
    """Runs the command line with this program's arguments."""
    sys.exit(run([sys.executable, "-m", "shardwright"], sys.argv[1:]))


if __name__ == "__main__":
    main()
