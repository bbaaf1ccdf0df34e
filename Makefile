# make demo | test | quick | check | bench | gpu-check | clean.  `make help` explains each.
# PYTHON chooses the interpreter (3.11 or newer); TORCH the build of torch, such as a local wheel.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
FIXTURES := $(wildcard ../shared/fixtures)
export SHARDLINE_FIXTURES ?= $(if $(FIXTURES),$(abspath $(FIXTURES)))
export DO_NOT_TRACK = true
export MLFLOW_DISABLE_TELEMETRY = true
export PREFECT_SERVER_ANALYTICS_ENABLED = false

.PHONY: help install demo test quick check bench gpu-check clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       install, then the whole chain on text found on this machine, with a report"
	@echo "make test       install, then every test (needs no network and no GPU)"
	@echo "make quick      the tests that take under a few minutes"
	@echo "make check      formatting, lint, types, import directions"
	@echo "make bench      speed as ratios against peers, measured on this machine in one run"
	@echo "make gpu-check  parity and throughput on a CUDA device"
	@echo "make clean      remove the environment, the demo's store and caches"

install: $(STAMP)

# torch goes first, by its exact pin, so that no other build of it is pulled in by a dependency.
$(STAMP): pyproject.toml constraints.txt
	@echo "== environment: $(VENV) (this happens once, and again when the dependencies change)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Shardline needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "python -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP)
	@$(BIN)/shardline run examples/demo.yaml

test: $(STAMP)
	$(PYTEST) -n 2 --dist loadfile -m forks
	$(PYTEST) -n 2 --dist loadfile -m "not forks"

quick: $(STAMP)
	$(PYTEST) -n 2 --dist loadfile -m "forks and not slow"
	$(PYTEST) -n 2 --dist loadfile -m "not forks and not slow and not servers"

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) tests/test_architecture.py

bench: $(STAMP)
	@missed=; for name in startup ingest engines clean merge index training_step layouts encoders checkpoint memory conversion; do \
	  echo "== benchmarks/$$name.py"; OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$$name.py || missed="$$missed $$name"; done; \
	test -z "$$missed" || { echo "goals missed in:$$missed"; exit 1; }

gpu-check: $(STAMP)
	$(BIN)/python infra/gpu_check.py

clean:
	rm -rf $(VENV) demo .mypy_cache .ruff_cache .pytest_cache
