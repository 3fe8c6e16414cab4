"""Head maps in vLLM: local heads keep only sinks and a window in vLLM's hybrid KV cache (RedKnot,
section 4.3).

Every KV head becomes an attention layer of its own. So all pages have one size, and vLLM forms
groups of equal heads. Global and retrieval heads use stock attention. Local heads have a cache spec
with its manager (`spec`) and an attention that skips freed blocks, in one call for all of a layer
(`attention`). `model` puts them into vLLM's model classes.
"""
