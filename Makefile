# `make demo` trains a small Qwen3; `make test` runs every test. Both set up all they need in .venv and build/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell nproc)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

CPP_FILES = $(shell find include src examples docs -name '*.h' -o -name '*.cc')

.PHONY: help build demo test test-cpp test-asan test-python test-long test-compat test-arm lint format bench bench-quick bench-check performance mutate clean

help:
	@echo "make demo         train a small Qwen3 on fused operators and compare with the plain model"
	@echo "make test         every test: format, lint, C++ (also under ASan+UBSan), Python, operators at small shapes"
	@echo "make build        build and install into $(VENV)"
	@echo "make bench        operators and the 4-layer training step against eager and Inductor"
	@echo "make bench-quick  one large shape an operator and dtype, in under five minutes"
	@echo "make performance  measure for docs/performance.md, in under ten; EMULATE=avx2 for a section held to it"
	@echo "make mutate       flip terms in kernels one at a time: each must turn a test red"
	@echo "make format       clang-format and ruff, in place"
	@echo "make test-long    exhaustive and slow tests"
	@echo "make test-compat  transformers 4.57 and torchtitan 0.2.2, each in its own environment"
	@echo "make test-arm     cross-compile the C++ tests for Arm and run them in QEMU"

$(VENV)/.ready: requirements/dev.txt
	tools/system-packages.sh
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -r requirements/dev.txt
	touch $@

# One build serves the wheel, the C++ tests and the C++ benchmarks.
build: $(VENV)/.ready
	tools/system-packages.sh
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install -q --no-build-isolation --no-deps --force-reinstall . \
	  -Cbuild-dir=build/release -Ccmake.define.JUMAR_TESTS=ON -Ccmake.define.JUMAR_BENCH=ON

demo: build
	$(BIN)/python -m jumar.train.demo

test: lint test-cpp test-asan test-python bench-check

test-cpp: build
	ctest --test-dir build/release --output-on-failure

test-asan: $(VENV)/.ready
	cmake -G Ninja -S . -B build/asan -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DJUMAR_TORCH=OFF -DJUMAR_TESTS=ON \
	  -DJUMAR_SANITIZE=ON -DCMAKE_BUILD_TYPE=None >/dev/null
	cmake --build build/asan
	ASAN_OPTIONS=detect_leaks=0 ctest --test-dir build/asan --output-on-failure

test-python: build
	$(BIN)/python -m pytest tests

bench-check: build
	$(BIN)/jumar bench --op all --mode correctness --dtype fp32,bf16 --shape small,odd --layout contiguous

bench-quick: build
	$(BIN)/jumar bench --op all --quick

performance: build
	$(BIN)/python tools/performance --run $(if $(EMULATE),--emulate $(EMULATE))

test-long: build
	JUMAR_LONG_TESTS=1 ctest --test-dir build/release --output-on-failure
	JUMAR_LONG_TESTS=1 $(BIN)/python -m pytest tests

test-compat: build
	tools/test-compat.sh

test-arm:
	tools/test-arm.sh

lint: $(VENV)/.ready
	tools/system-packages.sh
	clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/ruff check .

format: $(VENV)/.ready
	clang-format -i $(CPP_FILES)
	$(BIN)/ruff check --fix .

bench: build
	$(BIN)/jumar bench --op all
	$(BIN)/python bench/qwen3_step.py

mutate: build
	$(BIN)/python tools/mutate

clean:
	rm -rf build $(VENV)
