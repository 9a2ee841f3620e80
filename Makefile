# `make` lists the targets. Each sets up what it needs: `.venv` with the versions of constraints.txt,
# or, with PYTHON=/path/to/python, that interpreter as it is (nothing is installed or downloaded).

SIZE ?= small
BENCH_ARGS ?=

ifdef PYTHON
PY := $(PYTHON)
SETUP := torch_offload.egg-info/entry_points.txt
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := .venv/bin/python
SETUP := .venv/.installed
endif

PIP := .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PYTHON=...      use an existing environment instead of .venv"

.PHONY: demo
demo: $(SETUP)  ## train with and without offload and compare (SIZE=small; 100m and 1b want a GPU)
	@$(PY) examples/demo.py --size $(SIZE)

.PHONY: test
test: lint  ## linters, types and every test that needs no GPU
	$(PY) -m pytest -q -m "not gpu and not multigpu"

.PHONY: lint
lint: $(SETUP)  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

.PHONY: test-gpu
test-gpu: $(SETUP)  ## every GPU test; fails where there is no GPU
	REQUIRE_GPU=1 $(PY) -m pytest -q -m "gpu and not multigpu"

.PHONY: bench
bench: $(SETUP)  ## the optimizer step against other schemes; writes a record (BENCH_ARGS="--params 1e9")
	@$(PY) benchmarks/bench_step.py $(BENCH_ARGS)

.PHONY: clean
clean:  ## delete reports, caches and build output; .venv stays
	rm -rf .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	rm -f .venv/.installed

# torch first: it is the large download, and a failure later does not repeat it.
.venv/.installed: pyproject.toml constraints.txt
	@python3 -c "import sys; sys.exit(sys.version_info < (3, 10))" \
		|| { echo "This needs Python 3.10 or newer; python3 is $$(python3 --version)"; exit 1; }
	@test -x .venv/bin/python || { echo "Creating .venv"; python3 -m venv .venv; }
	@echo "Installing torch into .venv (a large download; this takes minutes the first time)"
	@$(PIP) torch
	@echo "Installing Lightning, Accelerate, the tools and this project into .venv"
	@$(PIP) --editable ".[lightning,accelerate,dev]"
	@touch $@

# Nothing is installed: with PYTHONPATH this folder is enough for Python to see the entry point
# that makes Trainer(strategy="offload_optimizer") and accelerate's flag work.
torch_offload.egg-info/entry_points.txt: pyproject.toml
	@echo "Using $(PYTHON) as it is"
	@$(PYTHON) -c "from setuptools import setup; setup()" --quiet egg_info
	@touch $@
