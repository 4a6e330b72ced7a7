# Real Linux kernels with several nodes, or with real CXL memory, under QEMU's software emulation:
# no root needed, see docs/vm.md. The first run downloads about 120 MB into CXL_OFFLOAD_VM_CACHE
# or the user's cache folder. MACHINE=name runs one of tests/vm/machines only. A guest keeps little more
# than one CPU busy, so two boot beside each other (up to 6 GiB of memory); VM_GUESTS=1: one at a time.
VM_GUESTS ?= 2
.PHONY: test-vm

test-vm: $(STAMP)
	$(BIN)/python -m tests.vm.harness fetch
	CXL_OFFLOAD_VM=1 CXL_OFFLOAD_VM_RESULTS=$(CURDIR)/$(OUT)/vm $(BIN)/python -m pytest tests/vm/test_guests.py tests/vm/test_power_cuts.py -v \
	    -n $(VM_GUESTS) --dist worksteal \
	    --durations=0 -o junit_family=xunit1 --junitxml=$(OUT)/vm/junit.xml $(if $(MACHINE),-k "$(MACHINE)")
