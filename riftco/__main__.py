"""`python -m riftco`, the same as the `riftco` command."""

import sys

from riftco.cli import main

if __name__ == "__main__":
    sys.exit(main())
