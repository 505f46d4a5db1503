# `make demo` and `make test` work on a fresh machine: each makes .venv and installs what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes that tests are spread over: one a core, unless told.
JOBS ?= auto

.PHONY: demo test install lint types contracts unit docs benchmark gpu clean

demo: install
	$(BIN)/python examples/demo.py

test: lint types contracts unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

contracts: install
	$(BIN)/lint-imports

unit: install
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

docs: install
	$(BIN)/python docs/make_flags.py

# Smoke size on a CPU, full size on CUDA; writes BENCHMARKS.md.
benchmark: install
	$(BIN)/python benchmarks/run_all.py

# Everything that half an hour on a machine with a GPU is for: native build, tests on the device, benchmarks.
gpu: install
	$(BIN)/python benchmarks/all_on_gpu.py

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) runs
