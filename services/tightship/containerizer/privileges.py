"""What the kernel holds of a process's user, privileges and limits, for the values in force. Source: proc(5)."""

from __future__ import annotations

from collections.abc import Iterator

from tightship.containerizer import isolation
from tightship.kernel import cgroup
from tightship.v1 import containerizer_pb2 as pb
from tightship.v1 import spec_pb2

# Fields of the spec and of /proc/PID/status. Of Uid the effective one is told; capabilities are the bounding set.
_STATUS = (
    ("security.user", "Uid"),
    ("security.groups", "Groups"),
    ("security.capabilities", "CapBnd"),
    ("security.no_new_privs", "NoNewPrivs"),
    ("security.seccomp_profile", "Seccomp"),
)


def in_force(spec: spec_pb2.ContainerSpec, pid: int) -> Iterator[pb.InForce]:
    """Of a confined container all, its defaults too. Raises OSError where the process has gone."""
    if spec.filesystem.HasField("fd_limit"):
        file = f"/proc/{pid}/limits"
        for line in cgroup.read(file).splitlines():  # none of a process that has ended
            if line.startswith("Max open files"):
                yield pb.InForce(field="filesystem.fd_limit", file=file, value=line.split()[3])
    if isolation.is_confined(spec):
        file = f"/proc/{pid}/status"
        held = dict(line.partition(":")[::2] for line in cgroup.read(file).splitlines())
        for field, key in _STATUS:
            value = held.get(key, "").split()
            yield pb.InForce(field=field, file=file, value=value[1] if key == "Uid" else " ".join(value))
