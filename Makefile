# make demo and make test work on a fresh machine with Python 3.11 or newer, make and g++.
# Each builds its environment in .venv the first time, and again after setup.cfg has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Where nvidia-smi answers, the CuPy that fits the driver's CUDA version is installed as well.
comma := ,
CUDA_MAJOR := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\).*/\1/p' | head -n 1)
CUDA_EXTRA := $(if $(filter 12,$(CUDA_MAJOR)),$(comma)cuda12x)$(if $(filter 13 14,$(CUDA_MAJOR)),$(comma)cuda13x)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint docs clean

demo: $(VENV)/demo.done
	$(BIN)/python -m cupy_flash demo

# At most four processes: each has memory of a GPU for itself.
test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(VENV)/test.done
	$(BIN)/ruff check .

docs: $(VENV)/docs.done
	$(BIN)/sphinx-build -W -q docs docs/_build
	@echo "The pages are in docs/_build/index.html"

clean:
	rm -rf $(VENV) build dist docs/_build docs/gallery *.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV)/demo.done: EXTRAS := examples
$(VENV)/test.done: EXTRAS := test$(if $(CUDA_EXTRA),,$(comma)test-nogpu)
$(VENV)/docs.done: EXTRAS := docs
$(VENV)/%.done: setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) what '$(EXTRAS)$(CUDA_EXTRA)' in setup.cfg asks for"
	@$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)$(CUDA_EXTRA)]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is missing or older than 3.11; name another one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	    { rm -rf $(VENV); echo "On Debian and Ubuntu, 'apt install python3-venv' brings what is missing."; exit 1; }
