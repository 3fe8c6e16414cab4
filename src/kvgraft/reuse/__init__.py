"""What a host asks when it admits a request, whatever its page pool: what is cached of a prompt,
what the store should bring back, whether there is room, and what the request leaves behind for
others."""

# default share of what computing exact KV costs, that a graft in front of it must save
EXACTNESS_WEIGHT = 0.1
