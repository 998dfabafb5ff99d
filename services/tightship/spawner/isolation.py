"""The part of a LAUNCH order that confines a child: what is asked, checked, and the child's calls for it.

Stages are the fields of the spec that they honour, so that a refusal names the field.
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import struct

from tightship.common.packets import Packet
from tightship.kernel import capabilities, rootfs, seccomp
from tightship.kernel.calls import Calls
from tightship.kernel.rootfs import Bind, Descriptors, Tmpfs
from tightship.spawner import orders
from tightship.spawner.notices import notice

_FILTER = "security.seccomp_profile"
_RLIMIT = struct.Struct("=QQ")
_ID_MAX = 2**32 - 2
_GROUPS_MAX = 65_536  # NGROUPS_MAX
_MOUNTS_MAX = 64
_FD_LIMIT_MAX = 2**31 - 1
_TMPFS_MAX = 2**63 - 1


class Isolation:
    """`confined`: own root or /dev, kernel paths closed, and few privileges; else its limits alone are asked.

    `entered`: root, /dev and kernel paths are those of the process whose namespaces it enters.
    """

    __slots__ = (
        "_capabilities",
        "_fd_limit",
        "_filter",
        "_gid",
        "_groups",
        "_mounts",
        "_no_new_privs",
        "_root",
        "_uid",
        "confined",
        "entered",
    )

    def __init__(self, packet: Packet) -> None:
        """Raises OrderError naming the field."""
        self.confined = orders.boolean(packet, "confined", False)
        self.entered = orders.boolean(packet, "entered", False)
        fd_limit = orders.number(packet, "fd_limit", 0, 0, _FD_LIMIT_MAX)
        self._fd_limit = fd_limit or None
        self._root = orders.path(packet, "rootfs", "") or None
        mounts = packet.get("mounts") or []
        if not isinstance(mounts, list) or len(mounts) > _MOUNTS_MAX:
            raise orders.bad("mounts", f"must be a list of {_MOUNTS_MAX} at most")
        self._mounts = tuple(_mount(index, mount) for index, mount in enumerate(mounts))
        self._uid = _identity(packet, "uid")
        self._gid = _identity(packet, "gid")
        self._groups = _numbers(packet, "groups", _ID_MAX, _GROUPS_MAX)
        self._capabilities = _numbers(packet, "capabilities", 63, 64)
        self._no_new_privs = orders.boolean(packet, "no_new_privs", True)
        self._filter = self._made(packet.get("seccomp")) if self.confined else None

    def limit(self, calls: Calls) -> None:
        if self._fd_limit is not None:
            limits = _RLIMIT.pack(self._fd_limit, self._fd_limit)
            calls.add("filesystem.fd_limit", "prlimit64", 0, resource.RLIMIT_NOFILE, limits, 0)

    def mount(self, calls: Calls, taken: set[int], *, stdin: bool) -> None:
        """`taken` are the descriptors that are open; `stdin` is whether the first is a pipe, or /dev/null."""
        if not self.entered:
            rootfs.confine(calls, self._root, self._mounts, Descriptors(taken))
        if not stdin:
            rootfs.replace_null(calls, "dev", 0, Descriptors(taken))

    def become_user(self, calls: Calls, *, stdin: bool) -> None:
        """What is only root's is over. Capabilities are left for `give_up`."""
        if not self._no_new_privs:
            self._install_filter(calls)  # which then only root may
        kept = self._kept()
        capabilities.bound(calls, "security.capabilities", kept)
        if self._uid is not None and capabilities.CHOWN in capabilities.of_this_process():
            # So that it may open its /dev/stdout; /dev/null, which is in the place of no input, is the host's.
            for fd in (0, 1, 2) if stdin else (1, 2):
                calls.add("security.user", "fchown", fd, self._uid, -1)
        if self._groups is not None or self._gid is not None:
            groups = self._groups or ()
            packed = struct.pack(f"={len(groups)}I", *groups)
            calls.add("security.groups", "setgroups", len(groups), packed)
        if self._gid is not None:
            calls.add("security.user", "setresgid", self._gid, self._gid, self._gid)
        if self._uid is not None:
            if kept:
                capabilities.keep_over_setuid(calls, "security.user")
            calls.add("security.user", "setresuid", self._uid, self._uid, self._uid)

    def enter(self, calls: Calls, cwd: str, taken: set[int]) -> None:
        """As the user, who must be allowed to."""
        rootfs.enter(calls, "cwd", cwd, Descriptors(taken))

    def give_up(self, calls: Calls) -> None:
        """The last calls before the gate."""
        capabilities.limit(calls, "security.capabilities", self._kept(), ambient=not self._is_root())
        if self._no_new_privs:
            capabilities.no_new_privileges(calls, "security.no_new_privs")
            self._install_filter(calls)

    def _install_filter(self, calls: Calls) -> None:
        if self._filter is not None:
            seccomp.install(calls, _FILTER, self._filter)

    def _made(self, given: object) -> bytes | None:
        """The filter's program: the default one where nothing is asked and this machine can. Raises OrderError."""
        if given == "unconfined":
            return None
        if given is None and not seccomp.available():
            _notice_unfiltered()
            return None
        profile = seccomp.default(self._kept()) if given in (None, "default") else _profile(given)
        try:
            return seccomp.program(profile)
        except OSError as error:
            raise orders.OrderError(_FILTER, error.errno or errno.EIO, error.strerror or str(error)) from None

    def _is_root(self) -> bool:
        return (os.geteuid() if self._uid is None else self._uid) == 0

    def _kept(self) -> frozenset[int]:
        if self._capabilities is not None:
            return frozenset(self._capabilities)
        return capabilities.DEFAULT & capabilities.of_this_process() if self._is_root() else frozenset()


@functools.cache
def _notice_unfiltered() -> None:
    notice("libseccomp.so.2 is not there: confined commands run without the default filter of system calls")


def _profile(given: object) -> seccomp.Profile:
    """Of [default, [[names, action, [[argument, comparison, first, second]]]]]. Raises OrderError for another form."""
    if not isinstance(given, list):
        given = []
    try:
        default, rules = given
        return seccomp.Profile(
            _action(default),
            tuple(
                seccomp.Rule(
                    tuple(_word(name) for name in names),
                    _action(action),
                    tuple(seccomp.Comparison(*map(_value, comparison)) for comparison in comparisons),
                )
                for names, action, comparisons in rules
            ),
        )
    except (TypeError, ValueError):
        raise orders.bad("seccomp", "must be default, unconfined, or an action and a list of rules") from None


def _action(given: object) -> int:
    number = _value(given)
    if number not in seccomp.ACTIONS and not seccomp.ERRNO <= number <= seccomp.ERRNO + seccomp.ERRNO_MAX:
        raise ValueError
    return number


def _value(given: object) -> int:
    if not isinstance(given, int) or not 0 <= given < 1 << 64:
        raise ValueError
    return given


def _word(given: object) -> str:
    if not isinstance(given, str) or "\0" in given:
        raise ValueError
    return given


def _mount(index: int, packet: object) -> Bind | Tmpfs:
    if not isinstance(packet, dict):
        raise orders.bad("mounts", "must be objects")
    stage = f"filesystem.mounts.mount[{index}]"
    target = orders.path(packet, "target", "/")
    read_only = orders.boolean(packet, "read_only", False)
    if packet.get("tmpfs") is not None:
        return Tmpfs(stage, target, orders.number(packet, "tmpfs", None, 1, _TMPFS_MAX), read_only)
    source = orders.path(packet, "source", "/")
    return Bind(stage, source, target, read_only, orders.boolean(packet, "private", False))


def _identity(packet: Packet, field: str) -> int | None:
    return None if packet.get(field) is None else orders.number(packet, field, None, 0, _ID_MAX)


def _numbers(packet: Packet, field: str, highest: int, most: int) -> tuple[int, ...] | None:
    """Raises OrderError for what is no list of numbers from 0 to `highest`."""
    given = packet.get(field)
    if given is None:
        return None
    if not isinstance(given, list) or len(given) > most:
        raise orders.bad(field, f"must be a list of {most} at most")
    return tuple(orders.number({field: each}, field, None, 0, highest) for each in given)
