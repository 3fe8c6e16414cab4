"""`python -m kvgraft`."""

from kvgraft.cli import main

main()
