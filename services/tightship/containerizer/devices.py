"""What a spec says of devices, block I/O and access to nodes: the fields honoured, and their ranges. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tightship.common.errors import ServiceError, invalid
from tightship.v1 import spec_pb2

HONOURED = frozenset(
    {
        "blockio.device_limit_set.default_limit",
        "blockio.device_limit_set.device_limits",
        "blockio.max_device_limit_set.max_limits",
        "device.restrictions_set.restrictions",
    }
)

SHARES = "blockio.device_limit_set"
CAPS = "blockio.max_device_limit_set"
RULES = "device.restrictions_set"

_PERCENT_MAX = 100
# include/linux/kdev_t.h: 12 bits of major, 20 of minor.
_MAJOR_MAX = 2**12 - 1
_MINOR_MAX = 2**20 - 1
_UINT64_MAX = 2**64 - 1
# blk-throttle.c keeps operations per second in 32 bits.
_UINT32_MAX = 2**32 - 1
_ENTRIES_MAX = 256

_Block = spec_pb2.BlockIoSpec
_Device = spec_pb2.DeviceSpec


def check(spec: spec_pb2.ContainerSpec) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    shares = spec.blockio.device_limit_set
    if shares.HasField("default_limit"):
        _within(SHARES, "default_limit", shares.default_limit, 1, _PERCENT_MAX)
    _check_limits(SHARES, shares.device_limits, _PERCENT_MAX)
    caps = spec.blockio.max_device_limit_set.max_limits
    for cap in caps:
        if cap.op_type not in (_Block.READ, _Block.WRITE):
            raise _missing(CAPS, "op_type")
        if cap.limit_type not in (_Block.BYTES_PER_SECOND, _Block.IO_PER_SECOND):
            raise _missing(CAPS, "limit_type")
        most = _UINT64_MAX if cap.limit_type == _Block.BYTES_PER_SECOND else _UINT32_MAX
        same = [each for other in caps if _kind(other) == _kind(cap) for each in other.limits]
        _check_limits(CAPS, same, most)
    rules = spec.device.restrictions_set.restrictions
    _check_number(RULES, len(rules))
    for rule in rules:
        if rule.permission not in (_Device.ALLOW, _Device.DENY):
            raise _missing(RULES, "permission")
        if rule.type not in (_Device.DEVICE_CHAR, _Device.DEVICE_BLOCK, _Device.DEVICE_ALL):
            raise _missing(RULES, "type")
        if not rule.access or any(each not in (_Device.READ, _Device.WRITE, _Device.MKNOD) for each in rule.access):
            raise _missing(RULES, "access")
        if rule.HasField("major"):
            _within(RULES, "major", rule.major, 0, _MAJOR_MAX)
        if rule.HasField("minor"):
            _within(RULES, "minor", rule.minor, 0, _MINOR_MAX)


def _kind(cap: spec_pb2.BlockIoSpec.MaxLimit) -> tuple[int, int]:
    return cap.op_type, cap.limit_type


def _check_limits(field: str, limits: Iterable[spec_pb2.BlockIoSpec.DeviceLimit], most: int) -> None:
    seen = set()
    for each in limits:
        for name in ("major", "minor"):
            if not each.device.HasField(name):
                raise _missing(field, f"device.{name}")
        _within(field, "device.major", each.device.major, 0, _MAJOR_MAX)
        _within(field, "device.minor", each.device.minor, 0, _MINOR_MAX)
        if not each.HasField("limit"):
            raise _missing(field, "limit")
        _within(field, "limit", each.limit, 1, most)
        device = (each.device.major, each.device.minor)
        if device in seen:
            raise invalid(field, f"limits device {device[0]}:{device[1]} twice")
        seen.add(device)
    _check_number(field, len(seen))


def _check_number(field: str, number: int) -> None:
    if number > _ENTRIES_MAX:
        raise invalid(field, f"has {number} entries; {_ENTRIES_MAX} are the most", "OUT_OF_RANGE", value=number)


def _missing(field: str, name: str) -> ServiceError:
    return invalid(field, f"{name} is missing, or none of its values")


def _within(field: str, name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise invalid(field, f"{name} {value} is not within {low} to {high}", "OUT_OF_RANGE", value=value)
