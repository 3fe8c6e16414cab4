"""Reuse decisions at admission, independent of the host's page pool.

They cover what is cached of a prompt, what the store should restore, the room for it, and what the
request leaves for others.
"""

# default share of what computing exact KV costs, that a graft in front of it must save
EXACTNESS_WEIGHT = 0.1
