"""`python -m ragged`: plan a model's layout, or be advised on one. See `ragged.cli`."""

from __future__ import annotations

import sys

from ragged.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
