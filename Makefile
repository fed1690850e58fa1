# make demo | demo-text | test | lint | bench | bench-all | bench-quick | gpu | venv
#
# Each target makes .venv first where it is missing (SGLang is 11 GB installed, some minutes).
# PYTHON is what it is made with, VENV where it lies. `make gpu` takes PYTHON as it is where that has
# torch; GPU_FLAGS may be --json or --quick. Tests run in TEST_PROCESSES processes, file by file.

PYTHON ?= python3
VENV ?= .venv
TEST_PROCESSES ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_TEXT := $(VENV)/.installed-text

.PHONY: demo demo-text test lint bench bench-all bench-quick gpu venv
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	@$(BIN)/tessera-sglang demo

demo-text: $(INSTALLED_TEXT)
	@$(BIN)/tessera-sglang demo --text

test: $(INSTALLED)
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# Everything, saved; then plots and the tables of README.md. TESSERA_TRACES is where recorded sessions lie.
bench: $(INSTALLED_TEXT)
	@$(BIN)/python -W ignore -m benchmarks

bench-all: $(INSTALLED_TEXT)
	@$(BIN)/python -W ignore -m benchmarks --all

bench-quick: $(INSTALLED_TEXT)
	@$(BIN)/python -W ignore -m benchmarks --quick

# A machine with a GPU need not have SGLang: whichever Python has torch will do.
gpu:
	@if $(BIN)/python -c 'import torch, numpy' 2>/dev/null; then python=$(BIN)/python; \
	elif $(PYTHON) -c 'import torch, numpy' 2>/dev/null; then python=$(PYTHON); \
	else make --no-print-directory venv && python=$(BIN)/python; fi && \
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $$python -W ignore -m benchmarks.gpu $(GPU_FLAGS)

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet -e '.[sglang,dev]'
	@touch $@

$(INSTALLED_TEXT): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet -e '.[sglang,text]'
	@touch $@
