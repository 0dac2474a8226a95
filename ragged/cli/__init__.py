"""The command line: `python -m ragged plan` and `python -m ragged advise`.

`main` runs it; `models` finds the shapes, `blocks` and `units` read the options, `candidates` and `advise` compare.
"""

from ragged.cli.main import main

__all__ = ["main"]
