# The real TRL, lm-evaluation-harness and quantizers (bitsandbytes, gptqmodel, optimum-quanto, torchao)
# on the CPU, installed into .venv without what they need elsewhere, above all without a torch of
# theirs; see docs/transformers.md. About 500 MB the first time.
.PHONY: test-ecosystem

$(VENV)/.ecosystem: requirements-ecosystem.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-ecosystem.txt -c constraints.txt
	touch $@

test-ecosystem: $(STAMP) $(VENV)/.ecosystem
	$(BIN)/python -m pytest $(addprefix tests/integrations/transformers/,test_ecosystem.py \
	    test_quantized.py test_bitsandbytes.py test_int4_checkpoints.py) \
	    tests/ops/test_states_8bit_loading.py --durations=5
