"""Filters of system calls, made by libseccomp as programs for the kernel. Sources: seccomp(2), seccomp_rule_add(3).

Made in the parent, once for each profile; for a child a program is data. A system call of another architecture than the
machine's own (32-bit programs) ends the process.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Collection
from typing import NamedTuple

from tightship.kernel import capabilities, seccomp_default
from tightship.kernel.calls import Calls, Counted

# include/seccomp.h of libseccomp: actions; of two of them the number is with the action.
ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
KILL_THREAD = 0x00000000
TRAP = 0x00030000
LOG = 0x7FFC0000
ERRNO = 0x00050000
ACTIONS = frozenset({ALLOW, KILL_PROCESS, KILL_THREAD, TRAP, LOG})
ERRNO_MAX = 4095
# Comparisons of an argument with `first`; MASKED_EQ: of its bits in `first` with `second`.
LT = 2
EQ = 4
GT = 6
MASKED_EQ = 7

_CTL_OPTIMIZE = 8
_BINARY_TREE = 2
_UNKNOWN = -1
_INSTRUCTION = 8
_INSTRUCTIONS_MAX = 4096  # BPF_MAXINSNS
_SET_MODE_FILTER = 1

# include/uapi/linux/sched.h: CLONE_NEW* of those namespaces that clone(2) takes.
_CLONE_NEW = 0x7E020000
_AF_ALG, _AF_VSOCK = 38, 40
# sys/personality.h: PER_LINUX, PER_LINUX32, both with UNAME26, and the question what it is.
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)


class Comparison(NamedTuple):
    argument: int
    comparison: int
    first: int
    second: int = 0


class Rule(NamedTuple):
    """What is done at these calls, where all comparisons hold."""

    names: tuple[str, ...]
    action: int
    comparisons: tuple[Comparison, ...] = ()


class Profile(NamedTuple):
    default: int
    rules: tuple[Rule, ...]


class _Argument(ctypes.Structure):
    """struct scmp_arg_cmp."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def install(calls: Calls, stage: str, program: bytes) -> None:
    """From here on the child makes only calls that the filter lets through. Needs no_new_privs or CAP_SYS_ADMIN."""
    calls.add(stage, "seccomp", _SET_MODE_FILTER, 0, Counted(len(program) // _INSTRUCTION, program))


def available() -> bool:
    """Whether libseccomp is there."""
    return _library() is not None


def default(kept: Collection[int]) -> Profile:
    """For a process with these capabilities: what programs use; what else is known to be refused is EPERM, and what
    isn't known, as if the kernel didn't have it: ENOSYS."""
    allowed = set(seccomp_default.ALLOWED)
    for number in kept:
        allowed.update(seccomp_default.BY_CAPABILITY.get(number, ()))
    refused = set(seccomp_default.REFUSED).union(*seccomp_default.BY_CAPABILITY.values()) - allowed
    rules = [Rule(tuple(sorted(allowed)), ALLOW), Rule(tuple(sorted(refused)), ERRNO | errno.EPERM)]
    if capabilities.NUMBERS["CAP_SYS_ADMIN"] in kept:
        rules.append(Rule(("clone", "clone3"), ALLOW))
    else:
        # clone3's flags are in memory, where a filter can't look: programs then try clone.
        rules.append(Rule(("clone",), ALLOW, (Comparison(0, MASKED_EQ, _CLONE_NEW, 0),)))
    rules += [Rule(("personality",), ALLOW, (Comparison(0, EQ, each),)) for each in _PERSONALITIES]
    for comparison in (Comparison(0, LT, _AF_ALG), Comparison(0, EQ, _AF_ALG + 1), Comparison(0, GT, _AF_VSOCK)):
        rules.append(Rule(("socket",), ALLOW, (comparison,)))
    return Profile(ERRNO | errno.ENOSYS, tuple(rules))


@functools.lru_cache(maxsize=16)
def program(profile: Profile) -> bytes:
    """The filter's instructions. Raises OSError: ENOSYS without libseccomp, EINVAL for what can't be a filter.

    A name that libseccomp doesn't know is passed over, unless what is to be refused would be let through by that.
    """
    library = _library()
    if library is None:
        raise OSError(errno.ENOSYS, "libseccomp.so.2 is not there")
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(profile.default)))
    if not context:
        raise OSError(errno.EINVAL, f"{profile.default:#x} is no action")
    try:
        library.seccomp_attr_set(context, _CTL_OPTIMIZE, ctypes.c_uint32(_BINARY_TREE))
        for rule in profile.rules:
            _add(library, context, profile.default, rule)
        return _export(library, context)
    finally:
        library.seccomp_release(context)


def _add(library: ctypes.CDLL, context: ctypes.c_void_p, default_action: int, rule: Rule) -> None:
    if rule.action == default_action:
        return
    arguments = (_Argument * len(rule.comparisons))(*(_Argument(*each) for each in rule.comparisons))
    for name in rule.names:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number == _UNKNOWN and rule.action != ALLOW and default_action in (ALLOW, LOG):
            raise OSError(errno.EINVAL, f"libseccomp knows no system call {name}")
        if number < 0:
            continue  # not of this architecture
        result = library.seccomp_rule_add_array(
            context, ctypes.c_uint32(rule.action), number, len(rule.comparisons), arguments
        )
        if result < 0:
            raise OSError(errno.EINVAL, f"the rule for {name} can't be: {os.strerror(-result)}")


def _export(library: ctypes.CDLL, context: ctypes.c_void_p) -> bytes:
    fd = os.memfd_create("seccomp")
    with open(fd, "rb") as file:
        result = library.seccomp_export_bpf(context, fd)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        file.seek(0)
        made = file.read()
    if len(made) > _INSTRUCTIONS_MAX * _INSTRUCTION:
        raise OSError(errno.E2BIG, f"the filter has more than {_INSTRUCTIONS_MAX} instructions")
    return made


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    library.seccomp_init.restype = ctypes.c_void_p
    return library
