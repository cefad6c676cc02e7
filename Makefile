# `make demo` and `make test` need Python 3.11+ and make; both build `.venv` first.
PYTHON ?= python3
BIN := .venv/bin
# Without an NVIDIA driver the release of torch that the tests were measured with is taken.
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo -c constraints-cpu.txt)

.PHONY: help install demo test test-fast soak test-gpu lint type format docs clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

install: .venv/installed ## make .venv with the package and what the tests need

.venv/installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q $(CONSTRAINTS) -e '.[dev]'
	# Other readers of our drafters, for tests only; their pins would replace our torch and transformers.
	$(BIN)/pip install -q --no-deps dflash==0.1.0 speculators==0.9.0 hs-connectors==0.9.0
	touch $@

demo: install ## train a drafter on real text on this machine's CPU: 2 to 5 minutes
	$(BIN)/torchrun --standalone --nproc_per_node 3 -m dflash_ddp.train experiment=demo

test: install ## every test that needs no GPU
	$(BIN)/python -m pytest -m "not gpu and not soak"

test-fast: install ## the tests of one process: 2 minutes
	$(BIN)/python -m pytest -m "not gpu and not dist and not soak"

soak: install ## kill a run at random moments 100 times (SOAK_KILLS=n); 2 minutes
	$(BIN)/python -m pytest -s -m soak

test-gpu: ## the tests that need a GPU, in the Python that is active
	python3 -m pytest -m gpu

lint: install ## style
	$(BIN)/ruff check src tests demo docs
	$(BIN)/ruff format --check src tests demo docs

type: install ## types
	$(BIN)/mypy src

format: install ## rewrite in style
	$(BIN)/ruff check --fix src tests demo docs
	$(BIN)/ruff format src tests demo docs

docs: install ## write docs/configuration.md and docs/metrics.md anew
	$(BIN)/python docs/generate.py

clean: ## remove .venv and all runs
	rm -rf .venv outputs
