"""POSIX access lists as far as we use them: one more user on a file or directory of ours.

As the kernel's extended attribute `system.posix_acl_access` has them: acl(5), and posix_acl_xattr.h for the layout.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Collection
from pathlib import Path

SEARCH = 1
READ_WRITE = 6

_ATTRIBUTE = "system.posix_acl_access"
_VERSION = 2
_USER_OBJ, USER, GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NO_ID = 0xFFFFFFFF
_ENTRY = struct.Struct("<HHI")
_HEADER = struct.Struct("<I")


def set_users(path: Path, uids: Collection[int], permission: int) -> None:
    """Gives exactly these users `permission`; others that had just this lose it. The rest of the list stays.

    Raises OSError: ENOTSUP where the file system has no access lists, EPERM where the file isn't ours.
    """
    entries = read(path)
    kept = [each for each in entries if each[0] not in (USER, _MASK) or (each[0] == USER and each[1] != permission)]
    named = {uid for tag, _, uid in kept if tag == USER}
    kept += [(USER, permission, uid) for uid in set(uids) - named]
    if all(tag not in (USER, _GROUP) for tag, _, _ in kept):
        if len(entries) == len(kept):
            return  # nobody is named, and nobody was
    else:
        mask = 0
        for tag, granted, _ in kept:
            if tag in (USER, GROUP_OBJ, _GROUP):
                mask |= granted
        kept.append((_MASK, mask, _NO_ID))
    kept.sort(key=lambda each: (each[0], each[2]))
    os.setxattr(path, _ATTRIBUTE, _HEADER.pack(_VERSION) + b"".join(_ENTRY.pack(*each) for each in kept))


def read(path: Path) -> list[tuple[int, int, int]]:
    """(tag, permission, id) each; made of the mode where there is no list."""
    try:
        data = os.getxattr(path, _ATTRIBUTE)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        mode = os.stat(path).st_mode
        return [
            (_USER_OBJ, mode >> 6 & 7, _NO_ID),
            (GROUP_OBJ, mode >> 3 & 7, _NO_ID),
            (_OTHER, mode & 7, _NO_ID),
        ]
    return list(_ENTRY.iter_unpack(data[_HEADER.size :]))
