"""`python -m duemq_cli` is the command `duemq`."""

import sys

if not sys.flags.safe_path:
    # `-m` has put the current folder first: a package `broker` in it is not ours.
    sys.path.pop(0)

from duemq_cli import main

main()
