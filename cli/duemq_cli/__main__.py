"""`python -m duemq_cli` is the command `duemq`."""

import sys

if not sys.flags.safe_path:
    # `-m` has put the current folder first: a file `click.py` in it is not what we mean.
    sys.path.pop(0)

from duemq_cli import main

main()
