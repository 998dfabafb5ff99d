"""The next step after a failure, by the reason that the service gives, or by the code where there is none better."""

from __future__ import annotations

from collections.abc import Mapping

_BY_REASON = {
    "NAME_TAKEN": "look at it: tightship list {name}; end it: tightship destroy -f {name}",
    "DIRECTORY_EXISTS": "what is left of a container goes with: tightship cleanup {name}; what others made stays",
    "NOT_FOUND": "what there is: tightship list -ra",
    "PARENT_NOT_FOUND": "make it: tightship create {name} '', or give create -p",
    "PARENT_CLOSING": "wait for its end, then make it anew",
    "IN_USE": "with all that is in it: tightship destroy -f {name}",
    "LIVING": "end it first: tightship destroy -f {name}",
    "NO_PROCESS": "its state: tightship list {name}",
    "NO_OUTPUT": "only what run started has output: tightship list -ra",
    "CLEANUP_PENDING": "look: tightship list {name}; try again: tightship cleanup {name}",
    "CHILDREN_LIMIT": "end some of those below, or make it anew with a greater children_limit",
    "TOO_MANY_CONTAINERS": "end some: tightship list -r; the limit is --containers-max of the containerizer",
    "TOO_MANY_LEASES": "look: tightship leases; what this machine allows: tightship doctor",
    "FIELD_NOT_SUPPORTED": "leave it out; what this machine can honour: tightship doctor",
    "BAD_SPEC": "how a spec is written: tightship help specs",
    "BAD_NAME": "how names are written: tightship help names",
    "UNKNOWN_FIELD": "how a spec is written: tightship help specs",
    "MEMORY_TOO_SMALL": "give it more: memory {{ limit: BYTES }}",
    "LEASE_ENDED": "its output, while it is kept: tightship logs",
    "REQUEST_ID_REUSED": "use another request id",
    "OS_ERROR": "what this machine allows: tightship doctor",
    "STEP_FAILED": "what this machine offers: tightship doctor",
    "SPAWN_FAILED": "what this machine offers: tightship doctor",
    "STEP_TIMED_OUT": "try again; what hangs: tightship doctor",
    "SPAWNER_AWAY": "try again; if it stays so: tightship doctor",
    "SWITCHBOARD_AWAY": "try again; if it stays so: tightship doctor",
    "AUDIT_INCOMPLETE": "try again; if it stays so: tightship doctor",
    "JOURNAL_FAILED": "make room in the run directory: tightship doctor",
}

_BY_STATUS = {
    "UNAVAILABLE": "try again; what is up: tightship doctor",
    "PERMISSION_DENIED": "what you may do here: tightship doctor",
    "INTERNAL": "the services' log says more: service.log in the run directory, or their stderr",
}


def following(status: str, reason: str, metadata: Mapping[str, str]) -> str:
    """What to do next; empty where nobody knows."""
    hint = _BY_REASON.get(reason) or ("" if reason else _BY_STATUS.get(status, ""))
    return hint.format(name=metadata.get("name") or "NAME")
