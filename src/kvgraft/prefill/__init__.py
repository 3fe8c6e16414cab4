"""Prefill: plans, and the policies that recover them."""

# Policy of requests that name none; docs/results/real-model.md says why.
DEFAULT_POLICY = "spread"
# Setting of costs that are measured when a server or an engine starts.
MEASURED = "measured"
