# A fresh clone needs nothing before `make demo` or `make test`: both make .venv and install into it.
PYTHON ?= python3
# The tests compile kernels on any machine, with CuPy and NVRTC of this CUDA; CUDA=cuda12 where torch is built for that one.
CUDA ?= cuda13
BIN := .venv/bin
# Processes that run the tests; a test of several ranks starts its own.
WORKERS ?= 2
# What pip may install. CI adds requirements/ci.txt, or replaces the version of torch.
CONSTRAINTS ?= constraints.txt
INSTALL = -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS))
PIP_INSTALL = $(BIN)/python $(INSTALL)
# The first pip that knows groups of dependencies.
PIP := 'pip>=25.1'
STAMP := .venv/.installed
# The documentation is built in an environment of its own.
DOCS := .venv-docs
PYTEST := $(BIN)/python -m pytest

.PHONY: setup demo test test-slow peers wheel-test docs pictures dist sbom lock bench gpu clean

setup: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) $(PIP)
	$(PIP_INSTALL) --editable '.[$(CUDA)]' --group test
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
	$(PIP_INSTALL) --group pages
	$(PYTEST) -m slow -n $(WORKERS) --dist worksteal || test $$? -eq 5

# Random scripts under the layers of easymp.compat and under the libraries that they stand for.
peers: setup
	$(PIP_INSTALL) --group peers
	$(BIN)/python -m tests.compat.random_scripts

# The wheel, alone in an empty environment.
wheel-test:
	PYTHON=$(PYTHON) .ci/wheel-test

# The documentation, into site/. A warning is an error. BUILDER=zensical builds it by the successor of MkDocs.
BUILDER ?= mkdocs
docs: $(DOCS)/.installed
	$(BUILD_BY_$(BUILDER))

BUILD_BY_mkdocs = NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
BUILD_BY_zensical = $(DOCS)/bin/python docs/with_zensical.py site

$(DOCS)/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(INSTALL) $(PIP)
	$(DOCS)/bin/python $(INSTALL) --editable . --group docs
	touch $@

# The pictures of README.md and the site.
pictures: setup
	$(PIP_INSTALL) --editable '.[examples]' 'rich>=13'
	$(BIN)/python docs/images/make.py

# The files of a release, in dist/, made from the last commit.
dist: setup
	$(PIP_INSTALL) --group dist
	PYTHON=$(BIN)/python .ci/dist

# Names and versions of all packages that the tests run with, in CycloneDX's form.
sbom: setup
	$(PIP_INSTALL) --group dist
	cat constraints.txt requirements/ci.txt | $(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --mc-type library --output-reproducible - >sbom.cdx.json

# Renew the versions that CI installs. torch's stands in constraints.txt.
lock: setup
	$(BIN)/python requirements/lock.py

bench: setup
	$(PIP_INSTALL) --group bench
	set -e; for file in $(filter-out benchmarks/gpu.py benchmarks/llm.py,$(wildcard benchmarks/*.py)); do echo "--- $$file"; $(BIN)/python $$file; done
	$(BIN)/python benchmarks/llm.py --cpu

# All that a GPU has to show, at most nine minutes; again: goes on where it stopped.
gpu: setup
	$(PIP_INSTALL) --group bench
	$(BIN)/python benchmarks/gpu.py --keep

clean:
	rm -rf .venv $(DOCS) build dist site sbom.cdx.json *.egg-info .hypothesis
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
