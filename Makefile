# Everything a target needs it installs by itself into .venv; Python (3.10 or later) and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: help demo test lint types imports unit bench convergence docs clean

help:
	@echo "make demo   several processes train a small model together and show what they gained"
	@echo "make test   lint, types, direction of imports, all tests"
	@echo "make docs   the documentation, in site/"
	@echo "make bench  optimizer steps side by side with torch's (results in benchmarks/results)"
	@echo "make convergence  training loss of replicas that average now and then, against DDP (20 minutes)"

# torch comes first and pinned: asked for by another package it would be whichever build is newest.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,bench]"
	touch $@

demo: $(VENV)/ready
	$(BIN)/offbeat demo

test: lint types imports unit

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/mypy

imports: $(VENV)/ready
	$(BIN)/lint-imports

unit: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

bench: $(VENV)/ready
	$(BIN)/python benchmarks/step.py --save
	$(BIN)/python -m benchmarks.sync memory --save
	$(BIN)/python -m benchmarks.overlap link --save  # these two need root and iproute2
	$(BIN)/python -m benchmarks.sync link --save

convergence: $(VENV)/ready
	$(BIN)/python -m benchmarks.convergence --save
	$(BIN)/python -m benchmarks.precision --save

docs: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
