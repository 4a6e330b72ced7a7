# The real DeepSpeed on the CPU, installed into .venv: ZeRO stages 1, 2 and 3 with their host memory
# in tiers, see docs/deepspeed.md. The first run compiles DeepSpeed's CPU kernels (about 2 minutes).
.PHONY: test-deepspeed

$(VENV)/.deepspeed: requirements-deepspeed.txt $(VENV)/.installed
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation \
	    -r requirements-deepspeed.txt -c constraints.txt
	touch $@

test-deepspeed: $(STAMP) $(VENV)/.deepspeed
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest tests/integrations/deepspeed \
	    tests/integrations/test_run_deepspeed.py --durations=5
