# `make demo` and `make test` need Python 3.11 or newer and nothing else; they set everything up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# A worker for each core and two more, since many tests wait.
CORES := $(shell getconf _NPROCESSORS_ONLN)
INSTALL := $(BIN)/python tests/install.py $(BIN)/python
# Categories of tests/expected_skips.toml that may be left out, separated by commas; all where it is empty.
SKIPS ?=
PYTEST := $(BIN)/python -m pytest --strict-skips=$(SKIPS) --durations 10 --workers $$(($(CORES) + 2))
QUICK := -m "not slow" --hypothesis-profile quick

# Tests start hundreds of processes, and each would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo seeds test test-all test-quick test-tiny test-slurm test-versions coverage bench lint ruff types sizes words docs screenshots \
	answers answers-diff clean

demo: $(READY)
	$(BIN)/python examples/first_estimate.py

# What the documents behind Ullage describe, step by step, with the authors' job files and traces, and without a GPU.
SPEED ?= 120
seeds: $(READY)
	mkdir -p build
	SPEED=$(SPEED) $(BIN)/python benchmarks/dissertation/seeds.py --out build/seeds.md

test: $(READY) ruff sizes words
	$(MAKE) --no-print-directory -j 2 types test-quick

test-quick: $(READY)
	$(PYTEST) $(QUICK)

# One estimate of each kind, and a job through the manager: ten seconds. Only files that have such a test are collected.
test-tiny: $(READY)
	$(BIN)/python -m pytest -m tiny $$(grep -rl --include='test_*.py' pytest.mark.tiny tests)

# The lines that the quick tests reach. What runs in a private world, or is killed, cannot tell, and counts as not reached.
coverage: $(READY)
	rm -rf build/coverage && mkdir -p -m 1777 build/coverage
	status=0; $(subst -m pytest,-m coverage run -m pytest,$(PYTEST)) $(QUICK) || status=$$?; \
		$(BIN)/python tests/coverage_by_room.py && exit $$status

test-all: $(READY) lint
	$(PYTEST)

# Slurm of the distribution, installed where root runs this and it is missing; the tests start and stop their own.
test-slurm: $(READY)
	if [ "$$(id -u)" = 0 ]; then tests/debian.sh slurm; fi
	$(PYTEST) --strict-skips=root,packages,system tests/manager/slurm

# Every release of PyTorch in an environment of its own, below .venvs: gigabytes, and hours. ONLY="2.6 2.15" takes a part.
test-versions:
	$(PYTHON) tests/versions.py $(if $(ONLY),--only $(ONLY))

bench: $(READY)
	$(BIN)/python benchmarks/speed/estimates.py allocator
	$(BIN)/python benchmarks/speed/estimates.py billions
	$(BIN)/python benchmarks/speed/simulator.py decisions
	$(BIN)/python benchmarks/speed/simulator.py trace
	$(BIN)/python benchmarks/speed/manager.py submit
	$(BIN)/python benchmarks/speed/manager.py starts
	$(BIN)/python benchmarks/speed/manager.py orders
	$(BIN)/python benchmarks/speed/manager.py estimates
	$(BIN)/python benchmarks/speed/page_speed.py
	$(BIN)/python benchmarks/speed/estimates.py commands
	$(BIN)/ullage evaluate --truth benchmarks/data/h200_runs.jsonl.gz
	$(BIN)/python benchmarks/speed/monitor_overhead.py

# What Ullage answers, case by case: before and after a change that is to leave all answers as they are.
OUT ?= build/answers.txt
answers: $(READY)
	$(BIN)/python benchmarks/answers.py ask $(OUT) --scripts=$(SCRIPTS)

answers-diff: $(READY)
	$(BIN)/python benchmarks/answers.py diff $(OLD) $(NEW)

lint: ruff types sizes words

ruff: $(READY)
	$(BIN)/ruff check src lab tests benchmarks examples
	$(BIN)/ruff format --check src lab tests benchmarks examples

types: $(READY)
	$(BIN)/mypy

# The lines of each room, which may not grow above budget.toml unnoticed.
sizes: $(READY)
	$(BIN)/python tests/sizes.py

# Refused words and names, which `make test` checks as well, and spelling.
words: $(READY)
	$(BIN)/python tests/words.py
	$(BIN)/codespell README.md CONTRIBUTING.md CHANGELOG.md tests/README.md docs lab/docs src lab/src benchmarks examples

docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pictures of the web page, in docs/images. It needs Chromium.
screenshots: $(READY)
	$(BIN)/python docs/screenshots.py

$(VENV)/docs: $(READY)
	$(INSTALL) --editable ".[docs]"
	touch $(VENV)/docs

# What else tests can be run with: each would be skipped without its package.
$(VENV)/ci: $(READY)
	$(INSTALL) --editable ".[ci]"
	touch $(VENV)/ci

# Modules are compiled on all cores; a third of them are tests of packages and models that nobody loads here.
UNUSED := /(tests|debugpy|schemathesis|pip|mypy|mypyc|jedi|docutils|IPython|prompt_toolkit|graphql|torchgen)/|/(torch/testing/_internal|transformers/models|pygments/lexers)/
$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[dev,models,gpu,triton,manager,slurm,page,scripts]" --editable ./lab
	$(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' $(VENV)/lib src lab/src || true  # some files are for other Pythons
	touch $(READY)

clean:
	rm -rf $(VENV) .venvs build dist site src/*.egg-info lab/build lab/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
