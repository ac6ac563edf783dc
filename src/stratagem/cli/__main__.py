"""`python -m stratagem.cli` is the command `stratagem`."""

from __future__ import annotations

import sys

from stratagem.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
