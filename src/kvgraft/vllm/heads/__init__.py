"""Head maps in vLLM: local heads keep sinks and a window in vLLM's own hybrid KV cache (RedKnot,
section 4.3).

Every KV head becomes an attention layer of its own, so that all pages have one size and vLLM forms
groups of equal ones: global and retrieval heads are stock attention; local ones bring a cache spec
with its manager (`spec`) and an attention that passes by what was given back (`attention`). `model`
puts them into vLLM's model classes."""
