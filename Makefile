# `make demo` and `make test` work on a fresh machine: each makes .venv and installs its needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Number of test processes; the default is one more than cores, because some tests wait.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(1 + (os.cpu_count() or 1))')
# Tests start hundreds of processes. Without bytecode on disk each process would compile memo again.
export PYTHONDONTWRITEBYTECODE :=
EMULATED := .venv-emulated
EMULATED_PIP = $(EMULATED)/bin/python -m pip install --quiet --disable-pip-version-check
# The packages that memo and its tests need, and those that torch needs in pure Python.
NEEDS_WITHOUT_TORCH = import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*(need for need in project["dependencies"] if not need.startswith("torch")), \
	"pytest", "pytest-timeout", "pytest-xdist", "filelock", "typing-extensions", "sympy", "networkx", "fsspec", "setuptools", sep="\n")

.PHONY: demo test test-full install lint types contracts unit docs dist benchmark gpu emulated clean

demo: $(VENV)/memo
	$(BIN)/python examples/demo.py

# Lint, types and contracts run in parallel with the tests, which wait now and then. A failure does not stop the rest.
test: install
	$(MAKE) --no-print-directory --jobs 2 --keep-going unit lint types contracts

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

contracts: install
	$(BIN)/lint-imports

unit: install
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not full"

# Longer versions of other tests: eight GPUs instead of two, all dtypes in all layouts, longer training.
test-full: install
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m full

# docs/flags.md, and all pages as a site; every link and anchor must have a target.
docs: install
	$(BIN)/python docs/make_flags.py
	$(BIN)/python -m mkdocs build --strict

# Wheel and sdist for an index. They are built without torch, so that one wheel serves every torch.
dist: install
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# Smoke size on a CPU, which only shows that scripts run (rows are not kept); full size on CUDA. Writes BENCHMARKS.md.
benchmark: install
	$(BIN)/python benchmarks/run_all.py

# All that needs a GPU, in half an hour: native build, tests on the device, benchmarks.
gpu: install
	$(BIN)/python benchmarks/all_on_gpu.py

# memo's CUDA code on a machine without a GPU: a CUDA build of torch on emulated libraries (csrc/emulated_gpu/README.md).
# One thread for each emulated kernel: with more, the rounding of a product would depend on the schedule.
emulated: $(EMULATED)/installed
	OMP_NUM_THREADS=1 $(EMULATED)/bin/python -m memo.emulated_gpu --poison -- $(CURDIR)/$(EMULATED)/bin/python -m pytest \
		-n $(JOBS) --dist worksteal -r s tests/gpu tests/emulated_gpu

# Three equal signs select the wheel on PyPI, the CUDA build (527 MB); --no-deps leaves out NVIDIA's libraries.
# Machines without a toolkit need CUDA's headers, in torch's version of CUDA.
$(EMULATED)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(EMULATED)
	$(EMULATED_PIP) --no-deps 'torch===$(shell sed -n 's/^torch==//p' constraints.txt)'
	cuda=$$(sed -n "s/^cuda[^']*'\([0-9.]*\)'.*/\1/p" $(EMULATED)/lib/python3*/site-packages/torch/version.py) && \
		$(EMULATED_PIP) --no-deps "nvidia-cuda-runtime==$$cuda.*" "nvidia-cuda-crt==$$cuda.*"
	$(PYTHON) -c '$(NEEDS_WITHOUT_TORCH)' > $(EMULATED)/needs.txt
	$(EMULATED_PIP) -c constraints.txt -r $(EMULATED)/needs.txt
	$(EMULATED_PIP) --no-deps -e .
	touch $@

install: $(VENV)/installed

# Only the needs of runs and their drawings: the tests' tools would take longer to install than the demo takes to run.
$(VENV)/memo: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report]'
	touch $@

$(VENV)/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) $(EMULATED) runs dist site
