# Real Linux kernels with several nodes, or with real CXL memory, under QEMU's software emulation.
# Downloads about 120 MB at the first run, into CXL_OFFLOAD_VM_CACHE or the user's cache folder;
# results of every machine are in $(OUT)/vm. MACHINE=name runs one of tests/vm/machines only.
.PHONY: test-vm

test-vm: $(STAMP)
	$(BIN)/python -m tests.vm.harness fetch
	CXL_OFFLOAD_REQUIRE_VM=1 $(BIN)/python -m pytest tests/vm/test_machines.py -v \
	    --durations=0 --junitxml=out/vm/junit.xml $(if $(MACHINE),-k "$(MACHINE)")
