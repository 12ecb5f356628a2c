PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: setup repro test lint type bench

setup: .venv/.installed      ## virtual environment with everything the suite needs

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q '$(TORCH)'
	$(BIN)/pip install -q -e '.[dev]'
	@touch $@

repro: setup                 ## run the widest matrix this host can hold and print the report's path
	$(BIN)/repro run --matrix auto

test: setup                  ## the whole test suite
	$(BIN)/python -m pytest

lint: setup                  ## style of every Python file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup                  ## static types
	$(BIN)/mypy

bench: setup                 ## micro-benchmarks
	$(BIN)/python -m pytest tests/bench --benchmark-enable --benchmark-only
