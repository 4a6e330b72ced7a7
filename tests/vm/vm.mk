# Real kernels with several nodes and with CXL memory, under software emulation: no root needed,
# about ten minutes on two cores. The first run fetches kernels and qemu (Debian packages).
.PHONY: test-vm

test-vm: $(STAMP)
	$(BIN)/python -m tests.vm.harness fetch
	CXL_OFFLOAD_VM=1 CXL_OFFLOAD_VM_RESULTS=$(CURDIR)/$(OUT)/vm $(BIN)/python -m pytest tests/vm -v
