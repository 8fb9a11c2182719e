"""``python -m cacheblend_rag``: the command line."""

from __future__ import annotations

import sys

from cacheblend_rag.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
