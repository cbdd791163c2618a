# The commands of this repository; `make help` lists them. Everything lives in .venv and quickstart/.
#
#   TORCH   what pip is asked for before anything else, so that no later requirement chooses a torch build for you.
#           It may carry pip options: TORCH='torch==2.13.0 --index-url URL' picks the builds served at URL (CPU, CUDA 12, …).
#   LOCK    1 installs the versions of requirements-lock.txt, those that the tests passed with, instead of the newest ones.
#   PYTHON  the interpreter .venv is made with (3.10 or newer).
#   CORPUS  text of your own for the quickstart (.jsonl or .txt, plain or compressed).
#   OUT     where the quickstart writes.
#   TESTS   options for pytest that choose among the tests of `make test`, such as '-m slow'.
#   WORKERS processes that run tests: four for two cores, since a third of a test's time is waiting (1 GB each).
#   WRITE   1 lets `make cluster` write its table into docs/launching.md.

TORCH  ?= torch==2.13.0
PYTHON ?= python3
OUT    ?= quickstart
CORPUS ?=
LOCK   ?=
TESTS  ?=
WORKERS ?= 4

BIN   := .venv/bin
# One stamp for each value of TORCH and LOCK: another value is another set-up, the same one does nothing.
STAMP := .venv/.ready-$(shell printf '%s' '$(TORCH)$(LOCK)' | cksum | cut -d ' ' -f 1)
VERSIONS := $(if $(LOCK),--constraint requirements-lock.txt)
# One thread each: tests start ranks of their own, and more threads only get in each other's way. Bytecode, also where the
# caller wants none: tests start some hundred processes, each of which would compile the package anew.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup quickstart lint docs test test-times check lock floors docker-steps endurance cluster ladder gpu-report

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo "  variables:      TORCH='$(TORCH)'  PYTHON=$(PYTHON)  OUT=$(OUT)  CORPUS=FILE.jsonl  LOCK=1  TESTS='-m slow'"

setup: $(STAMP) ## make .venv with all that the other commands need; nothing to do when it is current

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: '$(PYTHON)' is not a Python 3.10 or newer; name one: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv || \
	  { echo "error: '$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@rm -f .venv/.ready-*
	torch='$(TORCH)'; $(BIN)/python -m pip install --quiet $$torch setuptools wheel $(VERSIONS)
	$(BIN)/python -m pip install --quiet -e '.[dev]' $(VERSIONS)
	@touch $@
	@$(BIN)/python -c 'import sys, torch; print(f"ready: .venv with Python {sys.version.split()[0]}, torch {torch.__version__}")'

quickstart: $(STAMP) ## text → tokenizer → pre-training → export → fine-tuning → report, in about 6 minutes
	@PATH="$(CURDIR)/$(BIN):$$PATH" OUT='$(OUT)' CORPUS='$(CORPUS)' bash examples/quickstart.sh

lint: $(STAMP) ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy

docs: $(STAMP) ## the documentation as a site, in site/, with the pages of docs/ladder's rows; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test: $(STAMP) ## all tests that a machine without a GPU can run, 9 to 19 minutes on 2 cores
	$(PYTEST) $(TESTS)

test-times: $(STAMP) ## the same, and CPU seconds and waits of each test in build/test-times.csv
	$(PYTEST) -p tests.times $(TESTS)

check: lint docs ## lint, format, types, the documentation's links and the tests of what changed since main
	$(PYTEST) $$($(BIN)/python -m tests.changed)

lock: $(STAMP) ## write requirements-lock.txt anew: the newest versions that pyproject.toml allows, for every Python
	$(BIN)/python -m pip install --quiet uv
	bash tools/lock_requirements.sh

floors: $(STAMP) ## an hour and 14 GB: the fast tests with the lowest and with the newest versions that pyproject.toml allows
	$(BIN)/python -m pip install --quiet uv
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.endurance.floors

endurance: $(STAMP) ## hours: fifty kills, a crash at every moment, thousands of damaged files, every layout, drawn settings; writes tables in docs/
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.endurance.kills --kills 50
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.crash --write
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.endurance.damage --write
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.endurance.layouts --write
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.endurance.combinations

cluster: $(STAMP) ## as root, 12 minutes: real ssh, pdsh and Slurm on hosts made of namespaces
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.cluster $(if $(WRITE),--write)

ladder: $(STAMP) ## figures of docs/ladder and tables of docs/lab/plateau*.md from the rows in docs/ladder
	$(BIN)/megatron-ddrp compare docs/ladder/rows.jsonl --output-dir build/ladder
	cp build/ladder/figures/losses.png build/ladder/figures/onsets.png docs/ladder/
	$(BIN)/megatron-ddrp compare docs/ladder/fast.jsonl docs/ladder/novels.jsonl --output-dir build/fast --tables docs/lab/plateau.md
	cp build/fast/figures/claims.png docs/ladder/past-the-plateau.png
	$(BIN)/megatron-ddrp compare docs/ladder/plateau.jsonl --output-dir build/plateau --tables docs/lab/plateau-arms.md
	cp build/plateau/figures/losses.png docs/ladder/arms.png

docker-steps: $(STAMP) ## minutes: the Dockerfile's steps in a fresh virtual environment, for machines without docker
	$(BIN)/python -m tests.endurance.docker_steps --arg TORCH_INDEX='$(TORCH_INDEX)'

gpu-report: $(STAMP) ## on a machine with a CUDA device, 10 minutes per call: tests and times in gpu-report.md and .json, to send in
	@$(BIN)/python benchmarks/gpu_report.py
