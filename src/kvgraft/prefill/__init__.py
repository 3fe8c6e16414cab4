"""How a plan is recovered: a method a file in `policies`, over the protocol that every host has."""

DEFAULT_POLICY = "transitive"  # of requests that name none; docs/results/quality.md says why
