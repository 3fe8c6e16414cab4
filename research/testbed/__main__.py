"""`python -m kvgraft.testbed.training`: train the testbed model, or go on where a run was stopped."""

import typer

from kvgraft.testbed.training.command import main

if __name__ == "__main__":
    typer.run(main)
