"""Reuse decisions at admission, independent of the host's page pool.

They cover cached text of a prompt, blocks that the store should restore, the room for them, and
blocks that the request leaves for others.
"""

# Share of the cost of computing exact KV that a graft in front of it must save, by default.
EXACTNESS_WEIGHT = 0.1
