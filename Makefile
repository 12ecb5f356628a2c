PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
LOCK ?= cpu
PYTHON_VERSION ?= 3.12
SERVICE ?= $(if $(filter cuda,$(LOCK)),repro,smoke)

.PHONY: setup repro test test-docker lint type bench wheelhouse image

setup: .venv/.installed      ## virtual environment with everything the suite needs

ifeq ($(origin TORCH),command line)  # what is asked for now is installed now
.PHONY: .venv/.installed
endif
.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q '$(TORCH)'
	$(BIN)/pip install -q -e '.[dev]'
	@touch $@
	@echo 'installed; for a shell with its commands type: . .venv/bin/activate'

repro: setup                 ## run the widest matrix this host can hold and print the report's path
	$(BIN)/repro run --matrix auto

test: setup                  ## the test suite, less what needs a container engine or takes a minute
	$(BIN)/python -m pytest -m 'not docker and not long' -n 3 --dist loadfile

test-docker: setup           ## images and services, for real; skipped where no engine answers
	$(BIN)/python -m pytest -m 'docker and not long' tests/docker

lint: setup                  ## style of every Python file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup                  ## static types
	$(BIN)/mypy

bench: setup                 ## micro-benchmarks
	$(BIN)/python -m pytest tests/bench --benchmark-enable --benchmark-only

wheelhouse:                  ## files of LOCK=cpu|cuda for PYTHON_VERSION, to build an image without an index
	PYTHON=$(PYTHON) scripts/wheelhouse $(LOCK) $(PYTHON_VERSION)

image:                       ## the image of LOCK=cpu|cuda, labelled with the commit
	env $$(scripts/stamp.py) docker compose build $(SERVICE)
