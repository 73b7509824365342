# Two commands for everyone: `make demo` and `make test`. Each builds .venv on its first run.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: chaos demo docs nightly test test-compile test-fast test-install lint format clean

demo: $(VENV)/.installed
	$(BIN)/rankgrad demo

test: $(VENV)/.installed-test lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

# Every loss and metric through torch.compile's code generator: minutes, and it needs a C++ compiler.
test-compile: $(VENV)/.installed-test
	COMPILE_BACKEND=inductor OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q tests/test_compile.py

# Promises with a number each, tried many times; both write docs/reliability.md and take well under an hour on two cores.
chaos nightly: $(VENV)/.installed-test
	$(BIN)/python -m reliability $@

# The daily loop: under two minutes on two cores.
test-fast: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q -m "not slow and not gpu"

# Does everything resolve, with the torch that pip is configured to find here and with the ordinary one from the index? A current pip
# reads metadata only: nothing large is downloaded. A build of torch on this machine's disk would hide what the ordinary one requires.
ORDINARY := env -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS=
RESOLVE := .venv-install/bin/pip install --quiet --disable-pip-version-check --dry-run --ignore-installed -c constraints.txt torch
test-install: .venv-install/.installed
	$(RESOLVE) -e .
	$(RESOLVE) -e ".[test]"
	$(ORDINARY) $(RESOLVE) -e .
	$(ORDINARY) $(RESOLVE) -e ".[test]"
	@echo "4 passed, 0 failed"

.venv-install/.installed:
	$(PYTHON) -m venv .venv-install
	.venv-install/bin/pip install --quiet --disable-pip-version-check --upgrade pip
	touch $@

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The guides and the reference, build/docs/index.html. Warnings are errors.
docs: $(VENV)/.installed-test
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@echo build/docs/index.html

# torch is installed first and alone: under constraints.txt pip then never looks for another build of it. The extra is what
# `rankgrad report` needs, which the demo advises.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[report]"
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) .venv-install .pytest_cache .mypy_cache .ruff_cache
