# `make` lists the targets. Each sets up what it needs: `.venv` with the versions of constraints.txt,
# or, with PYTHON=/path/to/python, that interpreter as it is (nothing is installed or downloaded).

SIZE ?= small
BENCH_ARGS ?=
ON ?= cpu
# Tests that say nothing of the core that others do not say.
FRONT_ENDS := tests/test_accelerate* tests/test_lightning* tests/test_autoload* tests/test_bench* tests/test_build* tests/test_cli* \
	tests/test_demo*
# Tests that record what they find about each optimizer.
OUTCOME_TESTS = $(shell grep -l --include='test_*.py' -r '[(, ]record_outcome[,)]' tests)

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
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PYTHON=...         use an existing environment instead of .venv"

.PHONY: demo
demo: $(SETUP)  ## train with and without offload and compare (SIZE=small; 100m and 1b want a GPU)
	@$(PY) examples/demo.py --size $(SIZE)

.PHONY: test
test: lint  ## linters, types and every test that needs no GPU
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile \
		-m "not gpu and not multigpu and not exhaustive"

.PHONY: test-all
test-all: lint  ## the same, with those that try every place where something can fail
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile -m "not gpu and not multigpu"

.PHONY: test-oldest
test-oldest: .venv-oldest/.installed  ## the tests with the oldest versions that are supported
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -q -n 2 --dist loadfile \
		-m "not gpu and not multigpu and not exhaustive"

.PHONY: coverage
coverage: $(SETUP)  ## branch coverage of torch_offload without a GPU; writes docs/coverage.md
	$(PY) -m coverage erase
	OMP_NUM_THREADS=1 $(PY) -m coverage run -m pytest -q -n 2 --dist loadfile \
		-m "not gpu and not multigpu and not exhaustive" $(FRONT_ENDS:%=--ignore-glob=%)
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage json --quiet -o .coverage.json
	$(PY) tests/coverage_page.py .coverage.json

.PHONY: docs-table
docs-table: $(SETUP)  ## run each optimizer on the CPU (ON=gpu: on the GPU) and write docs/optimizers.md
	$(PY) -m pytest -q -m "$(if $(filter gpu,$(ON)),,not )gpu and not multigpu" $(OUTCOME_TESTS) --write-outcomes
	$(PY) tests/outcomes.py

.PHONY: lint
lint: $(SETUP)  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

.PHONY: test-gpu
test-gpu: $(SETUP)  ## every GPU test; fails where there is no GPU
	REQUIRE_GPU=1 $(PY) -m pytest -q -m "gpu and not multigpu"

.PHONY: test-multigpu
test-multigpu: $(SETUP)  ## every test over all GPUs of this machine; fails where there are not two
	REQUIRE_GPU=1 $(PY) -m pytest -q -m multigpu

.PHONY: bench
bench: $(SETUP)  ## the optimizer step against other schemes; writes a record (BENCH_ARGS="--params 1e9")
	@$(PY) benchmarks/bench_step.py $(BENCH_ARGS)

.PHONY: bench-multi
bench-multi: $(SETUP)  ## copies, steps and training on all GPUs at once; writes a record
	@$(PY) benchmarks/bench_multi.py $(BENCH_ARGS)

.PHONY: bench-peers
bench-peers: $(SETUP)  ## whole training steps against other libraries (the extra `bench`); writes a record
	@$(PY) benchmarks/bench_peers.py $(BENCH_ARGS)

.PHONY: bench-check
bench-check: $(SETUP)  ## is a fresh run as fast as the committed records, by ratios to its own probe
	@$(PY) benchmarks/bench_check.py $(BENCH_ARGS)

.PHONY: notebooks
notebooks: $(SETUP)  ## run notebooks/ and write their outputs (with a GPU: at full size; else SIZE=tiny)
	@$(PY) notebooks/run.py

.PHONY: dist
dist: $(SETUP)  ## wheel and source archive
	rm -rf dist
	$(PY) -m build

.PHONY: smoke
smoke: dist  ## install the wheel into an empty environment, and use it
	rm -rf .venv-smoke
	python3 -m venv .venv-smoke
	env -u PYTHONPATH .venv-smoke/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt "$$(ls dist/*.whl)[cli]"
	cd dist && unset PYTHONPATH && ../.venv-smoke/bin/python ../tests/smoke.py \
		&& ../.venv-smoke/bin/torch-offload plan --params 7e9

.PHONY: docs
docs: $(SETUP)  ## the documentation, in site/; a link that leads nowhere fails
	$(PY) -m sphinx -W --keep-going -q -b html docs site

.PHONY: bench-lightning
bench-lightning: $(SETUP)  ## training steps through Lightning's Trainer, plain and offloaded; writes a record
	@$(PY) benchmarks/bench_lightning.py $(BENCH_ARGS)

.PHONY: bench-overhead
bench-overhead: $(SETUP)  ## what hooks and waiting parameters cost the CPU; writes a record
	@$(PY) benchmarks/bench_overhead.py $(BENCH_ARGS)

.PHONY: bench-trainer
bench-trainer: $(SETUP)  ## a script with transformers' Trainer, plain and offloaded (BENCH_ARGS="--batch 4")
	@$(PY) benchmarks/bench_trainer.py $(BENCH_ARGS)

.PHONY: clean
clean:  ## delete reports, caches and build output; environments stay
	rm -rf .coverage* .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site .venv-smoke *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
	rm -f .venv/.installed .venv-oldest/.installed

# torch first: it is the large download, and a failure later does not repeat it.
.venv/.installed: pyproject.toml constraints.txt
	@python3 -c "import sys; sys.exit(sys.version_info < (3, 10))" \
		|| { echo "This needs Python 3.10 or newer; python3 is $$(python3 --version)"; exit 1; }
	@test -x .venv/bin/python || { echo "Creating .venv"; python3 -m venv .venv; }
	@echo "Installing torch into .venv (a large download; this takes minutes the first time)"
	@$(PIP) torch
	@echo "Installing Lightning, Accelerate, the tools and this project into .venv"
	@$(PIP) --editable ".[lightning,accelerate,dev,third-party]"
	@touch $@

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	@test -x .venv-oldest/bin/python || python3 -m venv .venv-oldest
	@echo "Installing the oldest versions into .venv-oldest (a large download)"
	@.venv-oldest/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		--constraint constraints-oldest.txt --editable ".[lightning,accelerate,dev]"
	@touch $@

# Nothing is installed: with PYTHONPATH this folder is enough for Python to see the entry point
# that makes Trainer(strategy="offload_optimizer") and accelerate's flag work.
torch_offload.egg-info/entry_points.txt: pyproject.toml
	@echo "Using $(PYTHON) as it is"
	@$(PYTHON) -c "from setuptools import setup; setup()" --quiet egg_info
	@touch $@
