# make demo | demo-text | test | lint | bench | bench-quick | gpu | venv
#
# Each target makes .venv first where it is missing (SGLang is 11 GB installed, some minutes).
# PYTHON is what it is made with, VENV where it lies.

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_TEXT := $(VENV)/.installed-text

.PHONY: demo demo-text test lint bench bench-quick gpu venv
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	@$(BIN)/tessera-sglang demo

demo-text: $(INSTALLED_TEXT)
	@$(BIN)/tessera-sglang demo --text

test: $(INSTALLED)
	@$(BIN)/python -m pytest

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.index

bench-quick: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.index --quick

gpu: $(INSTALLED)
	@echo "Nothing of this version was measured on a GPU. The kernel tests, on the CPU:"
	@$(BIN)/python -m pytest tests/attention

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet -e '.[sglang,dev]'
	@touch $@

$(INSTALLED_TEXT): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet -e '.[sglang,text]'
	@touch $@
