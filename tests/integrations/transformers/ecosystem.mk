# The real TRL, lm-evaluation-harness, torchao and optimum-quanto on the CPU, installed into .venv
# without what they need elsewhere, see docs/transformers.md. About 400 MB the first time.
.PHONY: test-ecosystem

$(VENV)/.ecosystem: requirements-ecosystem.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-ecosystem.txt -c constraints.txt
	touch $@

test-ecosystem: $(STAMP) $(VENV)/.ecosystem
	$(BIN)/python -m pytest tests/integrations/transformers/test_ecosystem.py \
	    tests/integrations/transformers/test_quantized.py --durations=5
