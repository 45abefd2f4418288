# A fresh clone needs nothing before `make demo` or `make test`: both make .venv and install into it.
PYTHON ?= python3
# The tests compile kernels on any machine, with CuPy and NVRTC of this CUDA; CUDA=cuda12 where torch is built for that one.
CUDA ?= cuda13
BIN := .venv/bin
# Processes that run the tests; a test of several ranks starts its own.
WORKERS ?= 2
STAMP := .venv/.installed
PYTEST := $(BIN)/python -m pytest

.PHONY: setup demo test test-slow wheel-test docs bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,examples,$(CUDA)]'
	touch $@

# The same training in one process and in two.
demo: setup
	@echo '--- one process'
	$(BIN)/python examples/digits.py
	@echo '--- two processes'
	$(BIN)/easymp launch --processes 2 examples/digits.py

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(PYTEST) -m 'not slow' -n $(WORKERS) --dist loadfile

# 5 is pytest's word for "none selected".
test-slow: setup
	$(PYTEST) -m slow -n $(WORKERS) --dist worksteal || test $$? -eq 5

# The wheel, alone in an empty environment.
wheel-test:
	PYTHON=$(PYTHON) .ci/wheel-test

# The documentation, into site/. A warning is an error.
docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	set -e; for file in benchmarks/*.py; do echo "--- $$file"; $(BIN)/python $$file; done

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
