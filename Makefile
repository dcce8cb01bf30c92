# make serve: install, get the demo model, start the server.   make test: install and run every test.
# make soak: five minutes of clients that leave, stall and send rubbish, and what they must not break.
# Variables: MODEL, ARGS (more server flags), PYTHON, PIP_ARGS (e.g. --extra-index-url https://download.pytorch.org/whl/cpu), PYTEST_ARGS.
PYTHON ?= python3
PIP_ARGS ?=
MODEL ?= demo
ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadfile
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check --quiet -c constraints.txt $(PIP_ARGS)

.PHONY: serve test soak clean

serve: $(VENV)/.runs
	$(PY) -m nano_sgl.server --model $(MODEL) $(ARGS)

test: $(VENV)/.tests
	$(PY) -m pytest $(PYTEST_ARGS)

soak: $(VENV)/.tests
	$(PY) bench/soak.py $(ARGS)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "nano_sgl needs Python 3.11 or newer; $(PYTHON) is not. Name another: make PYTHON=python3.12 ..."; exit 1; }
	@echo "making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

$(VENV)/.runs: pyproject.toml constraints.txt | $(PY)
	@echo "installing nano_sgl and what it runs on (torch is the largest part)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.tests: $(VENV)/.runs
	@echo "installing what the tests need"
	@$(PIP) -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV)
