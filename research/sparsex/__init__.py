"""SparseX: its tables beside ours. The experiments are those of `research.quality`."""
