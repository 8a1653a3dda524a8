# Everything a target needs it installs by itself into .venv; Python (3.11 or later) and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

# The oldest and the newest torch of the range in pyproject.toml. Others: make compat TORCHES="2.12.1 2.14.1"
TORCHES ?= 2.11.0 2.15.0
# Pins leave out what torch brings along in a version of its own. They are for Python 3.11 and later; for an older one:
# make compat PYTHON=python3.10 TORCHES=2.11.0 PINS=/dev/null
PINS ?= constraints.txt
# The short form of the tests: those that meet torch most closely.
COMPAT_TESTS := against_torch cuda distributed functional lbfgs local_sgd matrix optim_db optimizer overlap overlap_cells \
	averagers overlap_cuda overlap_ranks plan pure rounds_cuda state_dict tensors triton_compiles

.PHONY: help demo test lint types imports unit peers compat bench bench-gpu chaos convergence docs clean

help:
	@echo "make demo   two sites train over a slow link, and a step during backward: what offbeat gains (about a minute)"
	@echo "make test   lint, types, direction of imports, all tests"
	@echo "make compat  a short form of the tests on the oldest and the newest torch that are supported (downloads gigabytes)"
	@echo "make peers  optimizers of timm, optimi, schedule_free and pytorch_optimizer under overlap, and LightningCLI"
	@echo "make docs   the documentation, in site/"
	@echo "make bench  steps side by side with torch's, memory, slow links (these need root); writes benchmarks/results"
	@echo "make bench-gpu  the tests and benchmarks that need a GPU (uses PYTHON as it is: a CUDA build of torch with Triton)"
	@echo "make chaos  replicas that are stopped at random while they train: do all agree in the end? (three minutes)"
	@echo "make convergence  held-out loss of replicas that agree now and then, against DDP (half an hour)"
	@echo "make clean  removes what these have made, but not the results"

# What a user has: torch and the command line. torch comes first and pinned: asked for by another package it would be
# whichever build is newest.
$(VENV)/base: pyproject.toml constraints.txt
	@echo "setting up $(VENV) with PyTorch; the first time this takes a few minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[cli]"
	@touch $@

# And what the other targets need.
$(VENV)/ready: $(VENV)/base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,bench]"
	touch $@

demo: $(VENV)/base
	@echo "loading PyTorch ..."
	@PYTHONWARNINGS="ignore:Failed to initialize NumPy" $(BIN)/offbeat demo

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

# Without what they depend on: torchvision, which timm asks for, has no CPU build of the same torch.
$(VENV)/peers: $(VENV)/ready pyproject.toml
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['peers'], sep='\n')" > $@.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $@.txt
	touch $@

peers: $(VENV)/peers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -vv -rs tests/peers

compat: $(TORCHES:%=compat-%)

.PHONY: $(TORCHES:%=compat-%)
$(TORCHES:%=compat-%): compat-%: .venv-compat-%/ready
	OMP_NUM_THREADS=1 $(<D)/bin/python -m pytest -n $(JOBS) --dist loadgroup $(COMPAT_TESTS:%=tests/test_%.py)

.venv-compat-%/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -vE '^(torch|triton|setuptools)==' $(PINS) > $(@D)/pins.txt || true
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/pins.txt "torch==$*" -e ".[test]"
	touch $@

bench: $(VENV)/ready
	$(BIN)/python benchmarks/step.py --save
	$(BIN)/python -m benchmarks.sync memory --save
	$(BIN)/python -m benchmarks.overlap link --save  # these two need root and iproute2
	$(BIN)/python -m benchmarks.sync link --save

# Not in .venv, whose torch is a CPU build: PYTHON needs torch with CUDA, Triton, pytest, numpy and matplotlib. Each line is
# a part of its own: GPU="tests step" runs some of them.
GPU ?= tests step overlap matrices codecs convergence
bench-gpu: $(GPU:%=bench-gpu-%)

.PHONY: $(GPU:%=bench-gpu-%)
bench-gpu-tests:
	PYTHONPATH=src $(PYTHON) -m pytest tests/test_cuda.py tests/test_triton.py tests/test_compact.py tests/test_overlap_cuda.py \
		tests/test_products.py tests/test_rounds_cuda.py tests/test_wire_triton.py tests/test_matrix.py
bench-gpu-step:
	PYTHONPATH=src $(PYTHON) benchmarks/step.py --device cuda --save
bench-gpu-overlap:
	PYTHONPATH=src $(PYTHON) -m benchmarks.overlap gpu --save
bench-gpu-matrices:
	PYTHONPATH=src $(PYTHON) -m benchmarks.matrices --device cuda --save
	PYTHONPATH=src $(PYTHON) -m benchmarks.matrices_ranks --device cuda --ranks 1 2 --layers 12 --width 768 --save
bench-gpu-codecs:
	PYTHONPATH=src $(PYTHON) -m benchmarks.codecs --device cuda --numel 268435456
# With CONVERGENCE="--seconds 540" it stops after so long; CONVERGENCE="--seconds 540 --resume" then goes on.
bench-gpu-convergence:
	PYTHONPATH=src $(PYTHON) -m benchmarks.convergence --device cuda --save $(CONVERGENCE)

chaos: $(VENV)/ready
	$(BIN)/python -m benchmarks.chaos $(CHAOS)

convergence: $(VENV)/ready
	$(BIN)/python -m benchmarks.convergence --save
	$(BIN)/python -m benchmarks.precision --save

docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) .venv-compat-* build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
