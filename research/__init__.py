"""What reproduces papers, a folder a paper; run from the repository's root: `python -m
research.cross_query --help`."""
