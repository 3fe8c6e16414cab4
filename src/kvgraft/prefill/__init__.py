"""Prefill: plans, and the policies that recover them."""

# Policy of requests that name none; docs/results/real-model.md says why.
DEFAULT_POLICY = "spread"
