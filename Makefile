# `make demo` and `make test` work on a fresh machine: each makes .venv and installs what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes that tests are spread over: one more than cores, unless told, because some tests wait.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(1 + (os.cpu_count() or 1))')
# Tests start hundreds of processes. Without bytecode on disk each would compile memo again, and each worker all tests.
export PYTHONDONTWRITEBYTECODE :=
EMULATED := .venv-emulated
EMULATED_PIP = $(EMULATED)/bin/python -m pip install --quiet --disable-pip-version-check
# memo's needs with tests', and what torch itself needs in pure Python.
NEEDS_WITHOUT_TORCH = import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*(need for need in project["dependencies"] if not need.startswith("torch")), \
	"pytest", "pytest-timeout", "pytest-xdist", "filelock", "typing-extensions", "sympy", "networkx", "fsspec", "setuptools", sep="\n")

.PHONY: demo test test-full install lint types contracts unit docs dist benchmark gpu emulated clean

demo: $(VENV)/memo
	$(BIN)/python examples/demo.py

# Lint, types and contracts run beside the tests, which wait now and then; what any of them finds does not stop the rest.
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

# Tests that show at greater length what others show: eight GPUs for two, all dtypes in all layouts, longer training.
test-full: install
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m full

# docs/flags.md, and all pages as a site, of which every link and anchor must lead somewhere.
docs: install
	$(BIN)/python docs/make_flags.py
	$(BIN)/python -m mkdocs build --strict

# Wheel and sdist as they go to an index. pip builds them apart from torch, so that one wheel serves every torch.
dist: install
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# Smoke size on a CPU, whose rows prove that scripts run and are not kept; full size on CUDA. Writes BENCHMARKS.md.
benchmark: install
	$(BIN)/python benchmarks/run_all.py

# Everything that half an hour on a machine with a GPU is for: native build, tests on the device, benchmarks.
gpu: install
	$(BIN)/python benchmarks/all_on_gpu.py

# memo's CUDA code on a machine without a GPU: a CUDA build of torch on libraries of our own (csrc/emulated_gpu/README.md).
# One thread an emulated kernel: with more, how a product rounds depends on the thread that runs it, so on the schedule.
emulated: $(EMULATED)/installed
	OMP_NUM_THREADS=1 $(EMULATED)/bin/python -m memo.emulated_gpu --poison -- $(CURDIR)/$(EMULATED)/bin/python -m pytest \
		-n $(JOBS) --dist worksteal -r s tests/gpu tests/emulated_gpu

# Three equal signs get the wheel of PyPI, which is the CUDA build (527 MB); --no-deps leaves out NVIDIA's libraries.
# CUDA's headers, of torch's version of CUDA, are for machines without a toolkit.
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

# What runs and their drawings need: the tools of the tests would take longer to install than the demo runs.
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
