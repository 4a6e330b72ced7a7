"""From a machine to the command line of QEMU that boots it.

Facts behind the odd flags, seen by running it: software emulation with five-level page tables
(``la57``) does not boot; a CXL region cannot be committed while the guest knows that it is one
(``hypervisor=on``: ENXIO); and fast string instructions (``erms``, ``fsrm``) write past emulated
CXL memory, which takes one access at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.vm.harness.machine import MIB, MachineSpec
from tests.vm.harness.packages import Assets

__all__ = ["command_line"]

_KERNEL_OPTIONS = (
    *("console=ttyS0", "loglevel=3", "panic=-1", "oops=panic", "sysrq_always_enabled"),
    *("mitigations=off", "nokaslr", "random.trust_cpu=on", "transparent_hugepage=madvise"),
)


def command_line(
    spec: MachineSpec, assets: Assets, results: Path, media: Sequence[Path] = ()
) -> list[str]:
    """QEMU, the machine, and the host's files: all of them to read, ``results`` to write.

    Both are shared by 9p, so that the guest runs the interpreter and the build of the host. Each of
    ``media`` is a file that the guest has as persistent memory: ``/dev/pmem0`` and so on.
    """
    return [
        *assets.qemu_command(),
        *("-accel", "tcg,thread=multi", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-monitor", "none", "-serial", "stdio"),
        *_machine(spec, media),
        *_nodes(spec),
        *_persistent(media),
        *_hmat(spec),
        *(_cxl(spec) if spec.cxl else ()),
        *("-kernel", str(assets.vmlinuz(spec.kernel))),
        *("-initrd", str(assets.initrd(spec.kernel))),
        *("-append", " ".join([*_KERNEL_OPTIONS, *_memory_options(spec)])),
        *_share("host", Path("/"), "readonly=on,multidevs=remap"),
        *_share("results", results, "multidevs=forbid"),
    ]


def _machine(spec: MachineSpec, media: Sequence[Path]) -> list[str]:
    cores = spec.cpus // spec.sockets
    memory = sum(node.memory_bytes for node in spec.boot_nodes) // MIB
    cxl = spec.cxl is not None
    more = sum(path.stat().st_size for path in media) // MIB
    slots = f",slots={len(media)},maxmem={memory + more}M" if media else ""
    cpu = "max,hypervisor=off,erms=off,fsrm=off" if cxl else "max,la57=off"
    return [
        *("-machine", "q35,hmat=on" + (",cxl=on" if cxl else "") + (",nvdimm=on" if media else "")),
        *("-cpu", cpu, "-m", f"{memory}M{slots}"),
        *("-smp", f"{spec.cpus},sockets={spec.sockets},cores={cores},threads=1"),
    ]


def _nodes(spec: MachineSpec) -> list[str]:
    words = []
    for node in spec.boot_nodes:
        backend = f"memory-backend-ram,id=ram{node.id},size={node.memory_bytes // MIB}M"
        initiator = node.id if node.near is None else node.near
        cpus = "".join(f",cpus={number}" for number in spec.cpu_numbers(node.id))
        numa = f"node,nodeid={node.id},memdev=ram{node.id},initiator={initiator}{cpus}"
        words += ["-object", backend, "-numa", numa]
    for source, row in enumerate(spec.distances):
        for target, distance in enumerate(row):
            words += ["-numa", f"dist,src={source},dst={target},val={distance}"]
    return words


def _persistent(media: Sequence[Path]) -> list[str]:
    """What the guest writes is in the file at once, however the guest ends."""
    words = []
    for number, path in enumerate(media):
        size = path.stat().st_size
        backend = f"memory-backend-file,id=pmem{number},share=on,mem-path={path},size={size}"
        words += ["-object", backend, "-device", f"nvdimm,memdev=pmem{number},node=0"]
    return words


def _hmat(spec: MachineSpec) -> list[str]:
    words = []
    tables = (
        ("access-latency", spec.latency_ns, "latency={}"),
        ("access-bandwidth", spec.bandwidth_mb_per_s, "bandwidth={}M"),
    )
    for kind, table, value in tables:
        for initiator, row in table.items():
            for target, number in enumerate(row):
                pair = f"initiator={initiator},target={target}"
                what = f"hierarchy=memory,data-type={kind},{value.format(number)}"
                words += ["-numa", f"hmat-lb,{pair},{what}"]
    return words


def _cxl(spec: MachineSpec) -> list[str]:
    assert spec.cxl is not None
    size = spec.node(spec.cxl.node).memory_bytes // MIB
    window = "cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size=4G,cxl-fmw.0.interleave-granularity=8k"
    return [
        *("-object", f"memory-backend-ram,id=cxlram,size={size}M,share=on"),
        *("-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1"),
        *("-device", "cxl-rp,port=0,bus=cxl.1,id=rp0,chassis=0,slot=2"),
        *("-device", "cxl-type3,bus=rp0,volatile-memdev=cxlram,id=type3,sn=0xc0ffee"),
        *("-M", window),
    ]


def _memory_options(spec: MachineSpec) -> list[str]:
    options = []
    gigantic = [f"{node.id}:{node.gigantic_pages}" for node in spec.nodes if node.gigantic_pages]
    if gigantic:
        options += ["hugepagesz=1G", f"hugepages={','.join(gigantic)}"]
    if spec.cxl is not None:
        options.append(f"memhp_default_state={spec.cxl.online}")
    return options


def _share(tag: str, folder: Path, options: str) -> list[str]:
    return [
        *("-fsdev", f"local,id={tag},path={folder},security_model=none,{options}"),
        *("-device", f"virtio-9p-pci,bus=pcie.0,fsdev={tag},mount_tag={tag}"),
    ]
