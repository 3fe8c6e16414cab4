"""How a plan is recovered."""

DEFAULT_POLICY = "spread"  # of requests that name none; docs/results/real-model.md says why
# costs that are measured when a server or an engine starts
MEASURED = "measured"
