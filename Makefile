# Two commands for everyone: `make demo` and `make test`. The rest is for those who change the code.
PYTHON ?= python3
BIN := .venv/bin

# The Pythons of JetPack 6 and 7, wherever this machine keeps them.
PYTHON3.10 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.10.*/bin/python) $(shell command -v python3.10))
PYTHON3.12 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) $(shell command -v python3.12))

.PHONY: demo test test-workstation test-jetpack6 test-jetpack7 check bench generate clean

# Train, export, build and serve the calculators, and ask them with a stock client.
demo: .venv/installed
	$(BIN)/python deploy/demo.py

# Everything that runs on two cores without a GPU: the whole suite here, the device's half under JetPack's Pythons.
test: test-workstation test-jetpack6 test-jetpack7

test-workstation: .venv/installed
	$(BIN)/python -m pytest

test-jetpack6: PYTHON_JETPACK = $(PYTHON3.10)
test-jetpack6: VENV = .venv-jetpack6
test-jetpack7: PYTHON_JETPACK = $(PYTHON3.12)
test-jetpack7: VENV = .venv-jetpack7
test-jetpack6 test-jetpack7:
	@if [ -z "$(PYTHON_JETPACK)" ]; then echo "$@ skipped: its Python is not on this machine"; exit 0; fi; set -e; \
	if [ constraints.txt -nt $(VENV)/installed ] || [ pyproject.toml -nt $(VENV)/installed ]; then \
	  "$(PYTHON_JETPACK)" -m venv $(VENV) && $(VENV)/bin/pip install -q -c constraints.txt -e '.[cpu,test]' && touch $(VENV)/installed; fi; \
	$(VENV)/bin/python -m pytest tests/edge

# What a reviewer would ask for first: style, types, fresh generated code.
check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Serving against the bare runtime, on the demo's models.
bench: .venv/installed
	$(BIN)/fewheads bench .demo/repository/*

generate: .venv/installed
	$(BIN)/python proto/generate.py

# One pip call, so that the versions are resolved together: alone, tritonclient would fall back to an ancient release.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -c constraints.txt -e '.[cpu,export,rtx,test,dev]'
	touch $@

clean:
	rm -rf .venv .venv-jetpack6 .venv-jetpack7 .demo runs
