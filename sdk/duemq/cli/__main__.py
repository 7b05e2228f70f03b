"""`python -m duemq.cli` is the command `duemq`."""

from duemq.cli import main

main()
