"""What each limit of a spec writes: one table of field → file and value, for v1 and for v2, in the order of writing.

Pure. A controller is asked of the machine, which says which hierarchy has it, and in which version. What no hierarchy
has is refused naming the field; "unlimited" needs no file. Sources: cgroup-v1/*.rst, cgroup-v2.rst, sched-bwc.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tightship.common.errors import invalid
from tightship.containerizer import devices
from tightship.containerizer.machine import Hierarchy, Machine
from tightship.containerizer.spec import cpu_bits, cpu_list, unimplemented
from tightship.v1 import spec_pb2

# The default of cpu.cfs_period_us, and of cpu.max, which a quota is a share of.
_PERIOD_US = 100_000
# The least that cpu.shares takes.
_SHARES_MIN = 2
# What cpu.weight and io.weight take.
_WEIGHT_MIN, _WEIGHT_MAX = 1, 10_000
# cgroup.max.descendants is an int.
_DESCENDANTS_MAX = 2**31 - 1

_OP = spec_pb2.BlockIoSpec.OpType
_UNIT = spec_pb2.BlockIoSpec.LimitType
# Files of v1 and keys of io.max in v2.
_THROTTLES = {
    (_OP.READ, _UNIT.BYTES_PER_SECOND): ("blkio.throttle.read_bps_device", "rbps"),
    (_OP.WRITE, _UNIT.BYTES_PER_SECOND): ("blkio.throttle.write_bps_device", "wbps"),
    (_OP.READ, _UNIT.IO_PER_SECOND): ("blkio.throttle.read_iops_device", "riops"),
    (_OP.WRITE, _UNIT.IO_PER_SECOND): ("blkio.throttle.write_iops_device", "wiops"),
}
_DEVICES = spec_pb2.DeviceSpec
_DEVICE_TYPES = {_DEVICES.DEVICE_CHAR: "c", _DEVICES.DEVICE_BLOCK: "b", _DEVICES.DEVICE_ALL: "a"}
_ACCESS = {_DEVICES.READ: "r", _DEVICES.WRITE: "w", _DEVICES.MKNOD: "m"}


class Write(NamedTuple):
    """One write to a control file. `key` tells apart the writes to one file."""

    field: str
    hierarchy: Hierarchy
    file: str
    value: str
    key: str = ""


def writes(machine: Machine, spec: spec_pb2.ContainerSpec) -> Iterator[Write]:
    """In an order that a new directory takes. Raises UNIMPLEMENTED or INVALID_ARGUMENT naming the field."""
    yield from _cpu(machine, spec.cpu)
    yield from _memory(machine, spec.memory)
    if spec.HasField("blockio"):
        yield from _blockio(machine, spec.blockio)
    if spec.tasks.HasField("limit"):
        value = "max" if spec.tasks.limit < 0 else str(spec.tasks.limit)
        yield from _write(machine, "tasks.limit", "pids.max", value)
    if spec.HasField("device"):
        yield from _devices(machine, spec.device)
    if spec.HasField("children_limit"):
        yield from _children(machine.tracker, spec.children_limit)


def optional(machine: Machine, spec: spec_pb2.ContainerSpec) -> frozenset[str]:
    """Names of the machine's optional hierarchies in which the spec wants a directory. Raises UNIMPLEMENTED."""
    wanted = set()
    if spec.HasField("blockio"):
        wanted.add("blkio")
    if spec.HasField("device"):
        wanted.add("devices")
    if spec.monitoring.enable_perf_counters:
        # On the v2 tree it is a controller of every cgroup, and can't be seen there: cgroup-v2.rst, "perf_event".
        if machine.limits("perf_event") is None and not machine.perf_on_v2:
            raise unimplemented("monitoring.enable_perf_counters", "needs the kernel's perf_event controller")
        wanted.add("perf_event")
    return frozenset(each.name for each in machine.optional if each.name in wanted)


def _write(machine: Machine, field: str, file: str, value: int | str, key: str = "") -> Iterator[Write]:
    hierarchy = machine.limits(file.partition(".")[0])  # a file is named after its controller
    if hierarchy is None or file not in hierarchy.files:
        if value in (-1, "-1", "max"):
            return  # not limited is what a kernel without the file does
        raise unimplemented(field, f"needs the kernel's {file}, which this machine does not have")
    yield Write(field, hierarchy, file, str(value), key)


def _on_v2(machine: Machine, controller: str) -> bool:
    hierarchy = machine.limits(controller)
    return hierarchy is not None and hierarchy.version == 2


def _cpu(machine: Machine, cpu: spec_pb2.CpuSpec) -> Iterator[Write]:
    v2 = _on_v2(machine, "cpu")
    if cpu.HasField("limit"):
        if v2:
            weight = min(max(cpu.limit // 10, _WEIGHT_MIN), _WEIGHT_MAX)
            yield from _write(machine, "cpu.limit", "cpu.weight", weight)
        else:
            yield from _write(machine, "cpu.limit", "cpu.shares", max(_SHARES_MIN, cpu.limit * 1024 // 1000))
    if cpu.HasField("max_limit"):
        quota = cpu.max_limit * _PERIOD_US // 1000
        if v2:
            yield from _write(machine, "cpu.max_limit", "cpu.max", f"{quota} {_PERIOD_US}")
        else:
            yield from _write(machine, "cpu.max_limit", "cpu.cfs_period_us", _PERIOD_US)
            yield from _write(machine, "cpu.max_limit", "cpu.cfs_quota_us", quota)
    if cpu.scheduling_latency == spec_pb2.BEST_EFFORT:
        # After the weight, which an idle group refuses.
        yield from _write(machine, "cpu.scheduling_latency", "cpu.idle", 1)
    if cpu.HasField("mask"):
        bits = cpu_bits(list(cpu.mask.data))
        if machine.cpus and (absent := bits & ~machine.cpus):
            there = cpu_list(machine.cpus)
            raise invalid(
                "cpu.mask",
                f"there is no CPU {cpu_list(absent)[:80]}; this machine has {there}",
                "OUT_OF_RANGE",
                value=cpu_list(bits)[:200],
            )
        yield from _write(machine, "cpu.mask", "cpuset.cpus", cpu_list(bits))


def _memory(machine: Machine, memory: spec_pb2.MemorySpec) -> Iterator[Write]:
    if _on_v2(machine, "memory"):
        yield from _memory_v2(machine, memory)
        return
    if memory.HasField("max_limit"):
        raise unimplemented("memory.max_limit", "needs cgroup v2's memory.high, and memory is in v1 here")
    if memory.HasField("limit"):
        yield from _write(machine, "memory.limit", "memory.limit_in_bytes", memory.limit)
    swap_file = "memory.memsw.limit_in_bytes"
    if memory.HasField("swap_limit"):
        yield from _write(machine, "memory.swap_limit", swap_file, memory.swap_limit)
    if memory.HasField("swap_only"):
        yield from _write(machine, "memory.swap_only", swap_file, memory.limit + memory.swap_only)
    if memory.HasField("reservation"):
        yield from _write(machine, "memory.reservation", "memory.soft_limit_in_bytes", memory.reservation)


def _memory_v2(machine: Machine, memory: spec_pb2.MemorySpec) -> Iterator[Write]:
    throttled = memory.HasField("max_limit")
    if throttled:
        # The outer one first: between the two writes nothing is throttled for nothing.
        yield from _write(machine, "memory.max_limit", "memory.max", _bytes(memory.max_limit))
    if memory.HasField("limit"):
        file = "memory.high" if throttled else "memory.max"
        yield from _write(machine, "memory.limit", file, _bytes(memory.limit))
    if memory.HasField("swap_limit"):
        swap = -1
        if memory.swap_limit >= 0:
            # As the kernel does it on v1: memory and swap together are no less than memory alone.
            if not memory.HasField("limit") or memory.limit < 0 or memory.swap_limit < memory.limit:
                raise invalid(
                    "memory.swap_limit", "needs a memory.limit, and is no less", "OUT_OF_RANGE", value=memory.swap_limit
                )
            swap = memory.swap_limit - memory.limit
        yield from _write(machine, "memory.swap_limit", "memory.swap.max", _bytes(swap))
    if memory.HasField("swap_only"):
        yield from _write(machine, "memory.swap_only", "memory.swap.max", memory.swap_only)
    if memory.HasField("reservation"):
        yield from _write(machine, "memory.reservation", "memory.low", memory.reservation)


def _bytes(value: int) -> str:
    return "max" if value < 0 else str(value)


def _blockio(machine: Machine, blockio: spec_pb2.BlockIoSpec) -> Iterator[Write]:
    v2 = machine.limits("io")
    controller = "io" if machine.limits("blkio") is None and v2 is not None else "blkio"
    shares = blockio.device_limit_set
    if shares.HasField("default_limit"):
        yield from _weight(machine, controller, devices.SHARES, "", shares.default_limit)
    for each in shares.device_limits:
        yield from _weight(machine, controller, devices.SHARES, _number(each.device), each.limit)
    field = devices.CAPS
    for cap in blockio.max_device_limit_set.max_limits:
        file, key = _THROTTLES[cap.op_type, cap.limit_type]
        for each in cap.limits:
            device = _number(each.device)
            if controller == "io":
                yield from _write(machine, field, "io.max", f"{device} {key}={each.limit}", f"{device}.{key}")
            else:
                yield from _write(machine, field, file, f"{device} {each.limit}", device)


def _weight(machine: Machine, controller: str, field: str, device: str, percent: int) -> Iterator[Write]:
    """Shares of all devices, or of one: those of v1 are up to 1,000, those of v2 up to 10,000."""
    if controller == "io":
        value = f"{device or 'default'} {percent * 100}"
        yield from _write(machine, field, "io.weight", value, device)
        return
    hierarchy = machine.limits("blkio")
    files = frozenset() if hierarchy is None else hierarchy.files
    tail = "_device" if device else ""
    file = next(
        (each for each in (f"blkio.weight{tail}", f"blkio.bfq.weight{tail}") if each in files), f"blkio.weight{tail}"
    )
    yield from _write(machine, field, file, f"{device} {percent * 10}".strip(), device)


def _number(device: spec_pb2.Device) -> str:
    return f"{device.major}:{device.minor}"


def _devices(machine: Machine, device: spec_pb2.DeviceSpec) -> Iterator[Write]:
    for index, each in enumerate(device.restrictions_set.restrictions):
        file = "devices.allow" if each.permission == _DEVICES.ALLOW else "devices.deny"
        major, minor = (str(getattr(each, name)) if each.HasField(name) else "*" for name in ("major", "minor"))
        # The kernel takes "a" for all devices, whatever numbers follow: devices.rst.
        access = "".join(letter for value, letter in _ACCESS.items() if value in each.access)
        every = major == minor == "*" and access == "rwm"
        kinds = ("c", "b") if each.type == _DEVICES.DEVICE_ALL and not every else (_DEVICE_TYPES[each.type],)
        for kind in kinds:
            yield from _write(machine, devices.RULES, file, f"{kind} {major}:{minor} {access}", f"{index}{kind}")


def _children(tracker: Hierarchy, limit: int) -> Iterator[Write]:
    """Besides our own check. With leaves, each container below is two directories, and the first has a leaf too."""
    file = "cgroup.max.descendants"
    if file in tracker.files:
        most = 2 * limit + 1 if tracker.has_leaves else limit
        yield Write("children_limit", tracker, file, str(most) if most <= _DESCENDANTS_MAX else "max")
