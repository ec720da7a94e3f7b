# One command each; what they run stands here and nowhere else. `make setup` comes first.
PYTHON = .venv/bin/python

help:  ## this list
	@grep -E '^[a-z-]+:  ##' Makefile | sed 's/:  ##/\t/' | expand -t 12

.PHONY: help setup check format test test-gpu fuzz docs serve pictures bench package

setup:  ## a virtual environment with all that the checks, tests and pages need
	python3.11 -m venv .venv && .venv/bin/pip install -c requirements-ci.txt -e '.[dev,docs]'

check:  ## ruff, format, mypy, import contracts, sizes, habits, doctests, pages, packaging: half a minute
	$(PYTHON) -m pytest -q tests/checks

format:  ## mends most of what check finds
	$(PYTHON) -m ruff check --fix . ; $(PYTHON) -m ruff format .

test:  ## everything, as CI does on the newest torch
	$(PYTHON) -m pytest

test-gpu:  ## what needs GPUs, two for most of it; says so where there are none
	$(PYTHON) -m pytest -q tests/gpu

fuzz:  ## 200 random models beside eager FSDP2, bit for bit; goes on where it was stopped
	$(PYTHON) -m tests.bench.fuzz --models 200

docs:  ## the site, into site/
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

serve:  ## the site, while it is written
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs serve

pictures:  ## those of the pages, by the project's own tools; needs chromium
	$(PYTHON) docs/make_pictures.py --screenshots $(if $(TRACE),--trace $(TRACE))

bench:  ## the planner against torch's, growth with size, and the trace reader
	$(PYTHON) -m tests.bench.peer
	$(PYTHON) -m tests.bench.scale
	$(PYTHON) -m tests.bench.analyze_large_trace

package:  ## wheel and source archive, into dist/
	$(PYTHON) -m pip wheel --no-deps -w dist . && $(PYTHON) -m hatchling build -t sdist
