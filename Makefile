# `make` alone lists what there is. Two commands do all the set-up: `make demo` and `make test`.

VENV := .venv
BIN := $(VENV)/bin
AT_LEAST_311 := import sys; sys.exit(sys.version_info < (3, 11))

# The first interpreter on the path that runs and is new enough. `make test PYTHON=/path/to/python` names another.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c '$(AT_LEAST_311)' >/dev/null 2>&1 && echo $$p && break; done)

# Each module is compiled once and not in each process, whatever the shell says: tests start some thousand of them.
export PYTHONDONTWRITEBYTECODE :=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_PROGRESS_BAR := off
export PIP_ROOT_USER_ACTION := ignore
PIP_INSTALL = $(BIN)/python -m pip install --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test trials lint format docs-check docs dist clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r target text; do \
		printf '  make %-11s %s\n' "$$target" "$$text"; done

# Debian ships Python without the package that puts pip into a new environment; then the system's own pip puts it there.
$(BIN)/pip:
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(AT_LEAST_311)' 2>/dev/null || { \
		echo "rankscope needs Python 3.11 or newer: install it, or name it with 'make ... PYTHON=/path/to/python3.11'" >&2; exit 2; }
	@echo "Making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing PyTorch (the longest part, a minute or so)"
	@$(PIP_INSTALL) torch
	@echo "Installing Rankscope and its dashboard"
	@$(PIP_INSTALL) --editable '.[train,dashboard]'
	@touch $@

# What only the checks need: linters, trackers, and the frameworks whose examples the tests run.
$(VENV)/.checks: $(VENV)/.installed
	@echo "Installing what the checks need"
	@$(PIP_INSTALL) --editable '.[dev,train,fp8,dashboard,otel,trackers,lake,remote,stacks,mcp,hf,lightning,docs]'
	@touch $@

demo: $(VENV)/.installed ## Train a small GPT on four ranks with two faults, then say what went wrong
	$(BIN)/rankscope demo --no-dashboard
	@echo "(first, in this folder: . $(BIN)/activate)"

# What tests start but pip does not install: Prometheus, Alertmanager and Slurm, unpacked and not installed.
.programs/.fetched: tests/fetch_programs.sh
	@mkdir -p .programs
	@sh tests/fetch_programs.sh .programs
	@touch $@

test: $(VENV)/.checks .programs/.fetched ## Everything that must pass: lint, format, types, all tests
	@$(BIN)/python -m tests.suite

trials: $(VENV)/.checks .programs/.fetched ## Repeat what has a success rate and write the rates to docs/testing.md; hours
	@$(BIN)/python -m tests.trials

lint: $(VENV)/.checks ## Lint, format and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.checks ## Rewrite the code in the project's format and fix what lint can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs-check: $(VENV)/.checks ## Check links, anchors and commands in the documents
	$(BIN)/pytest tests/test_docs.py

docs: $(VENV)/.checks ## Build the documents as a site in build/site, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --site-dir build/site
	@echo "build/site/index.html"

# Publishing is then one command: `twine upload dist/*`.
dist: $(VENV)/.checks ## Build wheel and sdist in dist/ and check their metadata
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	@$(PIP_INSTALL) 'twine>=6'
	$(BIN)/python -m twine check --strict dist/*

clean: ## Remove caches and build products; keeps .venv and runs
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
