# `make demo` and `make test` need Python 3.11 or newer and nothing else; they set everything up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# A worker for each core and two more, since many tests wait.
CORES := $(shell getconf _NPROCESSORS_ONLN)
INSTALL := $(BIN)/python tests/install.py $(BIN)/python
PYTEST := $(BIN)/python -m pytest -rs --strict-skips --durations 10 --workers $$(($(CORES) + 2))

# Tests start hundreds of processes, and each would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-quick test-slurm test-versions bench lint ruff types docs screenshots clean

demo: $(READY)
	$(BIN)/python examples/first_estimate.py

test: $(READY) ruff
	$(MAKE) --no-print-directory -j 2 types test-quick

test-quick: $(READY)
	$(PYTEST) -m "not slow" --hypothesis-profile quick

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
	$(BIN)/python benchmarks/speed/estimates.py allocator
	$(BIN)/python benchmarks/speed/estimates.py billions
	$(BIN)/python benchmarks/speed/simulator.py decisions
	$(BIN)/python benchmarks/speed/simulator.py trace
	$(BIN)/python benchmarks/speed/manager.py submit
	$(BIN)/python benchmarks/speed/manager.py orders
	$(BIN)/python benchmarks/speed/manager.py estimates
	$(BIN)/python benchmarks/speed/page_speed.py
	$(BIN)/python benchmarks/speed/estimates.py commands
	$(BIN)/ullage evaluate --truth benchmarks/data/h200_runs.jsonl.gz
	$(BIN)/python benchmarks/speed/monitor_overhead.py

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
