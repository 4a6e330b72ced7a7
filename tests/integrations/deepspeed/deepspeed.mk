# The real DeepSpeed on the CPU, installed into .venv: ZeRO stages 1, 2 and 3 with their host memory
# in tiers, see docs/deepspeed.md. The first run compiles DeepSpeed's CPU kernels (about 2 minutes), in
# this clone's build folder: a compilation that was killed leaves a lock for which others wait forever.
.PHONY: test-deepspeed

$(VENV)/.deepspeed: requirements-deepspeed.txt $(VENV)/.installed
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation \
	    -r requirements-deepspeed.txt -c constraints.txt
	touch $@

test-deepspeed: $(STAMP) $(VENV)/.deepspeed
	PATH="$(abspath $(BIN)):$$PATH" TORCH_EXTENSIONS_DIR="$(abspath build/torch_extensions)" \
	    $(BIN)/python -m pytest tests/integrations/deepspeed \
	    tests/integrations/test_run_deepspeed.py $(BESIDE) --durations=5
