# Needs Python >= 3.11, pip and make; everything else goes into .venv.
# `make setup PYTHON=/path/to/python3.12` chooses the Python; ARGS goes to what a target runs.

PYTHON ?=
ARGS ?=
VENV_PYTHON := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup demo test check chaos chaos-ps bench format docs docs-serve api errors lock clean

help:
	@echo "make demo    train a small model on all devices and show how it goes"
	@echo "make test    all checks, then all tests; ARGS='-k name' goes to pytest"
	@echo "make check   ruff, format, pyright and the layers"
	@echo "make chaos   50 seeded runs whose workers are killed, stopped and preempted (20 minutes)"
	@echo "make chaos-ps  20 seeded runs whose parameter servers and their workers are killed (10 minutes)"
	@echo "make bench   benchmarks beside TensorFlow, PyTorch and JAX; ARGS='--only nnx' (25 minutes)"
	@echo "make format  let ruff format the files and mend what it can"
	@echo "make docs    build the documentation into site/; make docs-serve shows it while you write"
	@echo "make api     write the snapshot of the public API anew"
	@echo "make errors  write the messages on docs/what-can-go-wrong.md anew"
	@echo "make setup   make or refresh .venv (the others do it too)"
	@echo "make lock    write requirements/ anew after a change of dependencies"
	@echo "make clean   remove .venv and caches"

setup:
	@PYTHON='$(PYTHON)' sh scripts/setup.sh

demo: setup
	@$(VENV_PYTHON) examples/demo.py

check: setup
	@sh scripts/check.sh

test: check
	@$(VENV_PYTHON) scripts/run_tests.py $(ARGS)

chaos: setup
	@$(VENV_PYTHON) tests/multiprocess/chaos.py $(ARGS)

chaos-ps: setup
	@JAX_PLATFORMS=cpu $(VENV_PYTHON) tests/chaos_parameter_servers.py $(ARGS)

bench: setup
	@$(VENV_PYTHON) benchmarks/run.py $(ARGS)

format: setup
	@$(VENV_PYTHON) -m ruff check --quiet --fix . ; $(VENV_PYTHON) -m ruff format .

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict --quiet
	@echo "docs: site/index.html"

docs-serve: setup
	@NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs serve --dev-addr 127.0.0.1:8000

api: setup
	@KERAS_BACKEND=jax JAX_PLATFORMS=cpu $(VENV_PYTHON) tests/public_api.py

errors: setup
	@KERAS_BACKEND=jax JAX_PLATFORMS=cpu $(VENV_PYTHON) tests/what_can_go_wrong.py

lock:
	@PYTHON='$(PYTHON)' sh scripts/lock.sh $(ARGS)

clean:
	rm -rf .venv .venv-lock .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist site
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
