# The two commands are `make demo` and `make test`; each is complete from a fresh clone.
# `make PYTHON=python3.13 ...` chooses the interpreter.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= out

SOURCES := $(shell find csrc -name '*.cc' -o -name '*.h' -o -name '*.cu') \
           setup.py pyproject.toml
STAMP := $(VENV)/.built

.PHONY: all demo docs wheel wheel-for wheel-aarch64 sdist test test-slow check lint format test-cpp test-arm soak fuzz bench clean

all: $(STAMP)

$(VENV)/.installed: requirements-dev.txt constraints.txt
	@echo "$(VENV): installing torch and what the tests need; some minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt -c constraints.txt
	touch $@

# Editable, so that a change in Python needs no build; without isolation, so that the build uses
# the pinned tools that are there already.
$(STAMP): $(VENV)/.installed $(SOURCES)
	@echo "building the C++ core; some minutes"
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e .
	touch $@

# MODEL=path answers with a checkpoint of your own instead of the seeded one; KEEP=path leaves the
# seeded one there, for commands of your own.
demo: $(STAMP)
	@echo "demo: loading torch and FlexGen; all cores will be busy for some minutes"
	@$(BIN)/python examples/demo.py --output $(OUT)/demo $(if $(MODEL),--model $(MODEL)) \
	  $(if $(KEEP),--keep-model $(KEEP))

# The site, in out/docs; a warning is an error.
docs: $(STAMP) $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs $(OUT)/docs

$(VENV)/.docs: requirements-docs.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -r requirements-docs.txt -c constraints.txt
	touch $@

# For this interpreter and this machine's glibc, or older; docs/packages.md.
wheel: $(STAMP)
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --plat auto --wheel-dir dist build/wheel/*.whl

# For another Python or processor: built by this machine's compilers, tried with that Python, which
# comes from Debian's archive, and under qemu-user where the processor is foreign.
FOR ?= 3.13
PROCESSOR ?= $(shell uname -m)
wheel-for: $(STAMP)
	$(BIN)/python -m tests.packaging.elsewhere --python $(FOR) --processor $(PROCESSOR)

wheel-aarch64:
	$(MAKE) wheel-for FOR=3.11 PROCESSOR=aarch64

sdist: $(STAMP)
	$(BIN)/python -c "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"

# In as many processes as there are CPUs, and at most TEST_PROCESSES: each loads torch for itself.
# The tests of a file stay in one process, because they share what is slow to make; tests/conftest.py
# says in which order, so that no long file begins last. Bytecode is kept also where the environment
# says otherwise: a process would compile all that it imports, and tests start hundreds.
TEST_PROCESSES ?= 4
BESIDE = -n auto --maxprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest tests $(BESIDE)
test: $(STAMP)
	$(PYTEST) -m "not slow"

# What takes more than ten seconds a test, with the reason in its mark: wheels, the demo, training.
test-slow: $(STAMP)
	$(PYTEST) -m slow

# What CI runs besides the tests.
check: lint test-cpp

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(find csrc tests/cpp tests/gpu -name '*.cc' -o -name '*.h' -o -name '*.cu')

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc tests/cpp tests/gpu -name '*.cc' -o -name '*.h' -o -name '*.cu')

test-cpp:
	$(MAKE) -C tests/cpp odr sanitize

# The C++ tests of kernels for AArch64, under qemu-user; says so and skips where the tools are missing.
test-arm:
	$(MAKE) -C tests/cpp arm

# Threads, random operations and faults for MINUTES; SEED repeats a run.
MINUTES ?= 10
soak: $(STAMP)
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# Every fuzz target for FUZZ_SECONDS: in C++ under libFuzzer, documents under Atheris. Says so and
# skips what clang or Atheris (`pip install atheris`) is missing for.
FUZZ_SECONDS ?= 60
fuzz: $(STAMP)
	$(MAKE) -C tests/cpp fuzz FUZZ_SECONDS=$(FUZZ_SECONDS)
	@mkdir -p build/fuzz/corpus-documents
	@if $(BIN)/python -c 'import atheris' 2>/dev/null; then \
	  $(BIN)/python -m tests.fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=64 -timeout=60 \
	    -rss_limit_mb=2048 -artifact_prefix=build/fuzz/FUZZ_documents- build/fuzz/corpus-documents; \
	else echo "fuzz: documents skipped, Atheris is not there (pip install atheris)"; fi

-include tests/vm/vm.mk
-include tests/integrations/deepspeed/deepspeed.mk
-include tests/integrations/transformers/ecosystem.mk
-include tests/integrations/vllm/vllm.mk

clean:
	rm -rf build dist $(OUT) *.egg-info .hypothesis .pytest_cache cxl_offload/*.so
	rm -f $(STAMP) .venv-vllm/.built
