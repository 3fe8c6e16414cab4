"""`python -m research.testbed`: train the testbed model, or go on where a run was stopped."""

import typer

from research.testbed.command import main

if __name__ == "__main__":
    typer.run(main)
