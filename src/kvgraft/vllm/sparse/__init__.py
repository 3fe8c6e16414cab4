"""Flows in vLLM: decode steps attend only to the blocks that a flow chooses.

`program` reads which flow a server follows and refuses invalid configurations. `attention` extends
vLLM's attention backends with the flow.
"""
