# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up one virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow lint bench clean help

help: ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(READY) ## Set up, then show segment reuse on the bundled model
	$(BIN)/kvgraft demo

test: $(READY) ## Set up, then run the tests
	$(BIN)/python -m pytest

test-slow: $(READY) ## Run the tests that take minutes
	$(BIN)/python -m pytest -m slow

lint: $(READY) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## Measure time to first token, matching and alignment (minutes)
	$(BIN)/python benchmarks/ttft.py
	$(BIN)/python benchmarks/matching.py
	$(BIN)/python benchmarks/align.py

clean: ## Remove the virtual environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@echo "Setting up $(VENV): Python environment, PyTorch, KVGraft (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q torch==2.13.0
	@$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@
