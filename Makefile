# Few targets; each says what it does. PYTHON picks the interpreter (3.11 to 3.13).
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.PHONY: help setup demo test quicktest bench lint clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup:  ## install distribution packages, make the virtual environment, build the compiled parts
	@PYTHON=$(PYTHON) tools/setup.sh

demo: setup  ## run the main job with the real E2B SDK against a real micro-VM
	@$(RUN)/python -m tools.demo

test: setup  ## run every test and the linters; what cannot run here is listed with its reason
	@tools/as_root.sh $(RUN)/python -m pytest tests

quicktest: setup  ## run the tests that need neither root nor a VM
	@$(RUN)/python -m pytest tests -m "not vm and not root"

bench: setup  ## measure: resume in its three ends, with host facts
	@tools/as_root.sh $(RUN)/aenv bench resume

lint: setup  ## ruff and mypy
	@$(RUN)/ruff check . && $(RUN)/ruff format --check . && $(RUN)/mypy

clean:  ## remove what the build made (not the virtual environment, not the caches)
	rm -rf build dist *.egg-info aenv/_guest .pytest_cache .mypy_cache .ruff_cache
	find aenv ublk \( -name '*.so' -o -name '__pycache__' \) -prune -exec rm -rf {} +
	find aenv/_native -name '*.c' ! -name 'c_*.c' -delete
