# `make demo` and `make test` need Python 3.11 or newer and nothing else; they set everything up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# A process for each core and two more, since many tests wait; at most four, since each takes about a gigabyte.
CORES := $(shell getconf _NPROCESSORS_ONLN)
INSTALL := $(BIN)/python tests/install.py $(BIN)/python
PYTEST := $(BIN)/python -m pytest -rs --strict-skips --numprocesses $$(($(CORES) + 2)) --maxprocesses 4 --dist worksteal

# Tests start hundreds of processes, and each would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-quick test-slurm test-versions bench lint ruff types docs screenshots answers answers-diff clean

demo: $(READY)
	$(BIN)/python examples/first_estimate.py

test: $(READY) ruff
	$(MAKE) --no-print-directory -j 2 types test-quick

# A test that fails among hundreds of processes is tried once more, alone. Both outcomes are printed.
QUICK := -m "not slow" --hypothesis-profile quick
test-quick: $(READY)
	$(PYTEST) $(QUICK) || { [ $$? = 1 ] && $(PYTEST) $(QUICK) --numprocesses 0 --last-failed --last-failed-no-failures none; }

test-all: $(READY) lint
	$(PYTEST)

# Slurm of the distribution, installed where root runs this and it is missing; the tests start and stop their own.
test-slurm: $(READY)
	command -v slurmctld >/dev/null || [ -x /usr/sbin/slurmctld ] || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get \
		install -y -qq --no-install-recommends slurm-wlm slurm-client munge slurm-wlm-basic-plugins; }
	$(PYTEST) tests/slurm

# Every release of PyTorch in an environment of its own, below .venvs: gigabytes, and hours. ONLY="2.6 2.15" takes a part.
test-versions:
	$(PYTHON) tests/versions.py $(if $(ONLY),--only $(ONLY))

bench: $(READY)
	$(BIN)/python benchmarks/allocator_speed.py
	$(BIN)/python benchmarks/billions.py
	$(BIN)/python benchmarks/placement_speed.py
	$(BIN)/python benchmarks/simulation_speed.py
	$(BIN)/python benchmarks/manager_submit.py
	$(BIN)/python benchmarks/manager_orders.py
	$(BIN)/python benchmarks/manager_estimates.py
	$(BIN)/python benchmarks/page_speed.py
	$(BIN)/python benchmarks/estimate_speed.py
	$(BIN)/python benchmarks/virtual_gpu.py
	$(BIN)/python benchmarks/monitor_overhead.py

# What Ullage answers, case by case: before and after a change that is to leave all answers as they are.
OUT ?= build/answers.txt
answers: $(READY)
	$(BIN)/python benchmarks/answers.py ask $(OUT) $(if $(SCRIPTS),--scripts $(SCRIPTS))

answers-diff: $(READY)
	$(BIN)/python benchmarks/answers.py diff $(OLD) $(NEW)

lint: ruff types

ruff: $(READY)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples

types: $(READY)
	$(BIN)/mypy

docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pictures of the web page, in docs/images. It needs Chromium.
screenshots: $(READY)
	$(BIN)/python docs/screenshots.py

$(VENV)/docs: $(READY)
	$(INSTALL) --editable ".[docs]"
	touch $(VENV)/docs

# Modules are compiled on all cores; a third of them are tests of packages and models that nobody loads here.
UNUSED := /(tests|debugpy|schemathesis|pip|mypy|mypyc|jedi|docutils|IPython|prompt_toolkit|graphql|torchgen)/|/(torch/testing/_internal|transformers/models|pygments/lexers)/
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[dev,models,gpu,triton,manager,slurm,page,research,scripts]"
	$(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' $(VENV)/lib src || true  # some files are for other Pythons
	touch $(READY)

clean:
	rm -rf $(VENV) .venvs build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
