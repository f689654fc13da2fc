# Two commands for a fresh clone on a machine with Python >= 3.11:
#   make demo   the whole pipeline on the packaged tiny target (CPU)
#   make test   lint, types and the fast tests
PYTHON ?= python3
VENV ?= .venv
DEMO_DIR ?= demo
TORCH ?= torch==2.13.0
# A CPU build of torch comes from here where the configured index has none, so that no
# CPU machine downloads CUDA. On a CUDA machine use `pip install 'dflash-offline[gpu]'` instead.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check -q
PYTEST = $(VENV)/bin/python -m pytest

.PHONY: demo test test-all test-gpu lint clean

demo: $(VENV)/.runtime
	rm -rf $(DEMO_DIR)
	$(VENV)/bin/dflash demo --out $(DEMO_DIR)

test: $(VENV)/.development lint
	$(PYTEST) -n 2 -m "not slow and not gpu" --durations 15

test-all: $(VENV)/.development lint
	$(PYTEST) -n 2 -m "not gpu" --durations 25

# On a machine with a GPU, in an environment that has torch with CUDA and this package with its test extra.
test-gpu:
	$(PYTHON) -m pytest -m gpu

lint: $(VENV)/.development
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

$(VENV)/bin/python:
	$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('dflash-offline needs Python 3.11 or newer, this is ' + sys.version)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	$(PIP) install -c constraints.txt "$(TORCH)+cpu" || $(PIP) install -c constraints.txt "$(TORCH)+cpu" --extra-index-url $(TORCH_CPU_INDEX)
	touch $@

$(VENV)/.runtime: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) install -c constraints.txt -e .
	touch $@

$(VENV)/.development: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) install -c constraints.txt -e ".[test,lint]"
	touch $@ $(VENV)/.runtime

clean:
	rm -rf $(VENV) $(DEMO_DIR) build *.egg-info
