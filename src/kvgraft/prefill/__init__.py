"""How a plan is recovered."""

DEFAULT_POLICY = "transitive"  # of requests that name none; docs/results/quality.md says why
