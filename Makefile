# One command for everything; `make help` lists them. Nothing else is needed on a fresh machine than python3 (3.11+) and make.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The stamp changes with what is to be installed, so a pull that changes dependencies reinstalls by itself.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
# Tests wait for processes as often as they compute: four of them keep two cores busy for 89 % of the time. A file's tests
# stay together, because they share what they set up.
WORKERS ?= 4
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Where the time went, for whoever looks for it.
SLOWEST := --durations=25 --durations-min=5
# Found by verify rather than by test, so that whoever runs both runs nothing twice.
HOUSE := tests/unit/test_house.py tests/unit/core/manifest/test_crd_current.py
# Where it is set each process compiles what it imports, and pytest rewrites all tests each time.
unexport PYTHONDONTWRITEBYTECODE
# Kept between checkouts: what did not change is not checked anew.
export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/polyrl/mypy
JOB ?= examples/sort-digits/job.yaml
ARGS ?=

##@ Start here
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: install ## Run the main job (JOB=file, ARGS="--seed 1 --out DIR")
	$(BIN)/polyrl run $(JOB) $(ARGS)

test: install ## Pass all tests but those that need SGLang or Kubernetes (and what verify runs)
	$(BIN)/python -m pytest tests/integration tests/properties tests/security tests/unit $(HOUSE:%=--ignore=%) \
	  -m "not sglang and not mooncake and not trl and not api and not browser" -q $(PARALLEL) $(SLOWEST)

# What fails beside others and passes by itself was late on a crowded machine, or has a race: it is named either way. Where
# more fail, something is broken, and nothing is tried again.
MAX_AGAIN := 3
test-again: install ## Try those that failed in the last run of test once more, by themselves; at most 3, and it says which
	@$(BIN)/python -c 'import json, sys; failed = json.load(open(".pytest_cache/v/cache/lastfailed")); \
	  print(f"{len(failed)} failed", *failed, sep="\nFAILED ONCE "); sys.exit(len(failed) > $(MAX_AGAIN))'
	$(BIN)/python -m pytest tests/integration tests/properties tests/security tests/unit -q --last-failed --last-failed-no-failures none

##@ Develop
install: $(STAMP) ## Make .venv with everything pinned by constraints.txt
$(STAMP):
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install -q -c constraints.txt uv
	$(BIN)/uv pip install -q --python $(BIN)/python $$(make/torch-backend $(BIN)/uv $(BIN)/python) -c constraints.txt -e '.[all,dev]'
	@rm -f $(VENV)/.installed-*; touch $@

lint: install ## ruff: style, format, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## mypy strict
	$(BIN)/mypy

contracts: install ## import-linter: who may import whom
	$(BIN)/lint-imports

fmt: install ## Rewrite the code in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

crds: install ## Write what is generated: crds/ of the manifest models, its copy in the chart, docs/reference/manifest.md and cli.md
	$(BIN)/polyrl crd --out crds/polyrljobs.yaml
	cp crds/polyrljobs.yaml charts/polyrl/files/polyrljobs.yaml
	$(BIN)/polyrl crd --docs --out docs/reference/manifest.md
	$(BIN)/typer polyrl_cli.app utils docs --name polyrl --title "Command line" --output docs/reference/cli.md

constraints: install ## Resolve the newest pins within pyproject.toml's ranges, and lock them
	$(BIN)/uv pip compile -q --upgrade --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
	  --extra all --extra dev --extra s3 --extra gcs --extra mooncake --python-version 3.11 pyproject.toml -o constraints.txt
	$(LOCK)

# Of the pins alone, so it resolves nothing. A version that stays keeps the hashes it has: what an index has added to it since
# does not come in by itself.
LOCK = $(BIN)/uv pip compile -q --no-deps --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
  --python-version 3.11 --custom-compile-command "make lock" constraints.txt -o constraints.lock
lock: install ## Write constraints.lock: the pins with the SHA-256 of each of their files, by which images and releases install
	$(LOCK)

dead: install ## vulture: code that nothing uses
	$(BIN)/vulture

##@ Test
test-fast: install ## Pass the unit tests that take milliseconds: the inner loop, under a minute
	$(BIN)/python -m pytest tests/unit -m "not slow" -q -n 2 --dist loadfile

test-unit: install ## Pass all tests that need no process and no socket, schedules and exhaustive searches with them
	$(BIN)/python -m pytest tests/unit tests/properties -q $(PARALLEL)

test-integration: install ## Pass the tests on real sockets, processes and engines
	$(BIN)/python -m pytest tests/integration -m "not sglang and not mooncake and not trl and not api and not browser" -q $(PARALLEL)

verify: lint types contracts dead ## What must hold before a merge: style, types, layers, sizes, words, generated files, docs
	$(BIN)/python -m pytest -q $(HOUSE) tests/docs -n 2 --dist loadgroup --no-loadscope-reorder

include $(wildcard make/*.mk)

##@ Clean
clean: ## Remove what can be made again (keeps runs/)
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help run test test-again install lint types contracts dead fmt crds constraints lock test-fast test-unit test-integration verify clean
