"""How a launch is confined: `security` and `filesystem` of its spec, checked, as the part of the order to the spawner.

A container with `security`, a root or mounts of its own is *confined*: own namespaces, devices and /proc, kernel paths
closed, few capabilities, no new privileges. What can be known before anything is made is refused here; the rest is told
by the child, by stages that are the fields' names.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from tightship.common.errors import Code, ServiceError, errno_name, invalid
from tightship.common.rights import Rights
from tightship.containerizer import accounts, seccomp_profile
from tightship.kernel import capabilities
from tightship.v1 import spec_pb2

HONOURED = frozenset(
    {
        "filesystem.fd_limit",
        "filesystem.rootfs",
        "filesystem.mounts.mount",
        "security.user",
        "security.groups",
        "security.capabilities",
        "security.no_new_privs",
        "security.seccomp_profile",
    }
)
"""Fields that are checked here."""

NO_CAPABILITIES = "NONE"
DEFAULT_FILTER = "default"
UNFILTERED = "unconfined"

_FD_LIMIT_MAX = 2**31 - 1
_MOUNTS_MAX = 64
# A page; and what the kernel's loff_t holds.
_TMPFS_MIN = 4096
_TMPFS_MAX = 2**63 - 1
_GROUPS_MAX = 1024
_NAME_MAX = 256
_PATH_MAX = 4096
# A root needs them to be mounted on.
_NEEDED = ("proc", "dev")
_KERNELS = ("/proc", "/dev", "/sys")


def is_confined(spec: spec_pb2.ContainerSpec) -> bool:
    files = spec.filesystem
    return spec.HasField("security") or files.HasField("rootfs") or files.HasField("mounts")


def check(spec: spec_pb2.ContainerSpec) -> None:
    """All that the spec itself tells. Pure. Raises INVALID_ARGUMENT naming the field."""
    files, security = spec.filesystem, spec.security
    if files.HasField("fd_limit") and not 1 <= files.fd_limit <= _FD_LIMIT_MAX:
        raise invalid(
            "filesystem.fd_limit",
            f"{files.fd_limit} is not within 1 to {_FD_LIMIT_MAX}",
            "OUT_OF_RANGE",
            value=files.fd_limit,
        )
    if files.HasField("rootfs"):
        _check_path("filesystem.rootfs", files.rootfs)
        if os.path.normpath(files.rootfs) in ("/", "//"):
            raise invalid("filesystem.rootfs", "is the host's root: leave the field out to keep that")
    if len(files.mounts.mount) > _MOUNTS_MAX:
        raise invalid("filesystem.mounts.mount", f"has more than {_MOUNTS_MAX}")
    for index, mount in enumerate(files.mounts.mount):
        field = f"filesystem.mounts.mount[{index}]"
        _check_source(field, mount)
        _check_path(f"{field}.target", mount.target)
        target = "/" + os.path.normpath(mount.target).lstrip("/")
        if target == "/" or any(target == each or target.startswith(each + "/") for each in _KERNELS):
            raise invalid(f"{field}.target", "can't be the root, nor at or below /proc, /dev or /sys")
    if security.HasField("user"):
        _check_name("security.user", security.user)
    if len(security.groups) > _GROUPS_MAX:
        raise invalid("security.groups", f"has more than {_GROUPS_MAX}")
    for index, group in enumerate(security.groups):
        _check_name(f"security.groups[{index}]", group)
    _numbers(security)
    if security.HasField("seccomp_profile") and security.seccomp_profile not in (UNFILTERED, DEFAULT_FILTER):
        _check_path("security.seccomp_profile", security.seccomp_profile)


def with_user(spec: spec_pb2.ContainerSpec, caller: Rights) -> spec_pb2.ContainerSpec:
    """The spec as this client may have it: as the user that its entry names, who gets nothing of root's.

    Raises PERMISSION_DENIED naming the field that asks for more.
    """
    user = caller.run_as
    if user is None:
        return spec
    security, files = spec.security, spec.filesystem
    beyond = {
        "security.user": security.HasField("user") and security.user != user,
        "security.groups": bool(security.groups),
        "security.capabilities": bool(set(security.capabilities) - {NO_CAPABILITIES}),
        "security.no_new_privs": security.HasField("no_new_privs") and not security.no_new_privs,
        # A file that it may not read, perhaps; and what is wrong in it is told.
        "security.seccomp_profile": security.seccomp_profile not in ("", DEFAULT_FILTER),
        # By these it would reach what only directories above keep from that user.
        "filesystem.rootfs": files.HasField("rootfs"),
        "filesystem.mounts": files.HasField("mounts"),
    }
    for field, asked in beyond.items():
        if asked:
            caller.refuse(Code.PERMISSION_DENIED, f"{field} is not for it: it runs as {user}")
            raise ServiceError(
                Code.PERMISSION_DENIED,
                "FIELD_NOT_ALLOWED",
                f"{field}: this client's containers run as {user}, and get nothing beyond that",
                None,
                field=field,
            )
    own = spec_pb2.ContainerSpec()
    own.CopyFrom(spec)
    own.security.user = user
    return own


def order(spec: spec_pb2.ContainerSpec) -> dict[str, Any] | None:
    """What LAUNCH carries; None where nothing is asked. Looks at files. Raises ServiceError naming the field."""
    confined = is_confined(spec)
    files, security = spec.filesystem, spec.security
    asked: dict[str, Any] = {}
    if files.HasField("fd_limit"):
        asked["fd_limit"] = files.fd_limit
    if not confined:
        return asked or None
    asked["confined"] = True
    root = "/"
    if files.HasField("rootfs"):
        root = asked["rootfs"] = files.rootfs
        _look_at_root(root)
    if files.mounts.mount:
        asked["mounts"] = [_mount(index, mount) for index, mount in enumerate(files.mounts.mount)]
    if security.HasField("user"):
        found = accounts.user(root, security.user, "security.user")
        asked |= {"uid": found.uid, "gid": found.gid}
    if security.groups:
        groups = enumerate(security.groups)
        asked["groups"] = [accounts.group(root, each, f"security.groups[{index}]") for index, each in groups]
    if security.capabilities:
        asked["capabilities"] = _numbers(security)
    if security.HasField("no_new_privs"):
        asked["no_new_privs"] = security.no_new_privs
    if security.HasField("seccomp_profile"):
        named = security.seccomp_profile
        asked["seccomp"] = named if named in (UNFILTERED, DEFAULT_FILTER) else seccomp_profile.read(named)
    return asked


def first_field(spec: spec_pb2.ContainerSpec) -> str:
    """The field to be named where nothing of this can be had."""
    return "security" if spec.HasField("security") else "filesystem"


def _mount(index: int, mount: spec_pb2.FilesystemSpec.Mount) -> dict[str, Any]:
    if mount.HasField("tmpfs"):
        # A spawner that doesn't know tmpfs refuses this source: it is no path.
        return {"source": "tmpfs", "target": mount.target, "read_only": mount.read_only, "tmpfs": mount.tmpfs.size}
    field = f"filesystem.mounts.mount[{index}].source"
    try:
        os.stat(mount.source)
    except OSError as error:
        raise _missing(field, mount.source, error) from None
    return {
        "source": mount.source,
        "target": mount.target,
        "read_only": mount.read_only,
        "private": mount.private,
    }


def _look_at_root(root: str) -> None:
    field = "filesystem.rootfs"
    try:
        if not stat.S_ISDIR(os.stat(root).st_mode):
            raise invalid(field, f"{root} is no directory", "NOT_A_DIRECTORY", file=root)
        for name in _NEEDED:
            path = os.path.join(root, name)
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise invalid(field, f"{path} is no directory, which is needed to mount on", file=path)
    except OSError as error:
        raise _missing(field, str(error.filename), error) from None


def _missing(field: str, path: str, error: OSError) -> ServiceError:
    return invalid(
        field, f"{path}: {error.strerror}", "FILE_NOT_FOUND", file=path, errno=errno_name(error.errno), value=path
    )


def _numbers(security: spec_pb2.SecuritySpec) -> list[int]:
    """Capabilities to keep. Raises INVALID_ARGUMENT."""
    if list(security.capabilities) == [NO_CAPABILITIES]:
        return []
    for index, name in enumerate(security.capabilities):
        if name not in capabilities.NUMBERS:
            raise invalid(
                f"security.capabilities[{index}]",
                f'{name[:40]!r} is none: give names like "CAP_NET_BIND_SERVICE", or "{NO_CAPABILITIES}" alone',
            )
    return sorted({capabilities.NUMBERS[name] for name in security.capabilities})


def _check_source(field: str, mount: spec_pb2.FilesystemSpec.Mount) -> None:
    if not mount.HasField("tmpfs"):
        _check_path(f"{field}.source", mount.source)
        return
    if mount.HasField("source"):
        raise invalid(f"{field}.source", "has no place beside tmpfs")
    size = mount.tmpfs.size
    if not _TMPFS_MIN <= size <= _TMPFS_MAX:
        raise invalid(
            f"{field}.tmpfs.size", f"{size} is not within {_TMPFS_MIN} to {_TMPFS_MAX}", "OUT_OF_RANGE", value=size
        )


def _check_path(field: str, path: str) -> None:
    if not path.startswith("/"):
        raise invalid(field, f"{path[:80]!r} is not an absolute path")
    if "\0" in path or len(path.encode()) >= _PATH_MAX:
        raise invalid(field, f"has a NUL byte, or {_PATH_MAX} bytes or more")


def _check_name(field: str, name: str) -> None:
    if not name or len(name) > _NAME_MAX or any(each in name for each in "\0:\n"):
        raise invalid(field, f"{name[:40]!r} is no name or number")
