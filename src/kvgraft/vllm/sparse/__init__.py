"""Flows in vLLM: decode steps attend to the blocks that a flow chooses, through vLLM's own paged
attention kernel.

`program` says which flow a server follows, and refuses what cannot be right; `attention` is the CPU
backend with it."""
