PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS := nixl,mooncake-cpu,test,lint
# uv does not read pip's variable; without it a local CPU build of torch is not found.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# What every agent imports: compiled once, because an agent must start fast also where Python may not write caches.
HOT_PACKAGES := msgspec numpy rich typer zmq

.PHONY: setup demo test simulate check clean help
setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt deploy/install-system-libraries.sh
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvxfer needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[$(EXTRAS)]'
	cd $(VENV)/lib/python3*/site-packages && $(abspath $(BIN))/python -m compileall -q $(HOT_PACKAGES)
	bash deploy/install-system-libraries.sh
	touch $@

demo: setup
	$(BIN)/kvxfer demo

test: setup
	$(BIN)/python -m pytest --ignore=tests/kernels -m "not slow"
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels

simulate: setup
	$(BIN)/python -m pytest tests/simulation -m slow

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build *.egg-info

help:
	@echo "make setup     make .venv with all that is needed; so does every target below where it is missing"
	@echo "make demo      move the KV of a prompt between processes and compare every byte"
	@echo "make test      run the tests"
	@echo "make simulate  run twenty thousand simulated schedules"
	@echo "make check     ruff and mypy"
	@echo "make clean     remove .venv and caches"
