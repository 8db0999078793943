"""`python -m midstream` is `midstream`."""

import sys

from midstream.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
