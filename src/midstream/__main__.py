"""`python -m midstream` is `midstream`."""

import sys

from midstream.ui.cli import main

if __name__ == "__main__":
    sys.exit(main())
