"""Names of attributes in spans: OpenTelemetry's conventions for RPC and errors (1.38 and newer), and ours.

https://opentelemetry.io/docs/specs/semconv/rpc/grpc and /general/recording-errors.
"""

from __future__ import annotations

from typing import Final

RPC_SYSTEM: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_STATUS: Final = "rpc.response.status_code"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"

# The codes that are errors of a server's span; of a client's, all but OK are.
SERVER_ERRORS: Final = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)

CONTAINER_ID: Final = "tightship.container.id"
CONTAINER_NAME: Final = "tightship.container.name"
CANCEL_REASON: Final = "tightship.cancel.reason"
CANCEL_STEP: Final = "tightship.cancel.step"
"""The step that was on when it ended; in a recovered one the phase that the journal had: intended or committed."""
CLEANUP_BUDGET_MS: Final = "tightship.cleanup.budget_ms"
CLEANUP_OUTCOME: Final = "tightship.cleanup.outcome"
CLEANUP_LEFT: Final = "tightship.cleanup.left"
CLEANUP_PROCESSES: Final = "tightship.cleanup.processes_killed"
CLEANUP_CGROUPS: Final = "tightship.cleanup.cgroups_removed"
CLEANUP_LEASES: Final = "tightship.cleanup.leases_closed"
RECORD_REASON: Final = "tightship.record.reason"
LEASE_ID: Final = "tightship.lease.id"
LEASE_END: Final = "tightship.lease.end_reason"
LEASE_FDS: Final = "tightship.lease.fds_closed"
EXIT_CODE: Final = "tightship.exit.code"
EXIT_SIGNAL: Final = "tightship.exit.signal"
STDOUT_BYTES: Final = "tightship.stdout.bytes"
STDERR_BYTES: Final = "tightship.stderr.bytes"
LOST_BYTES: Final = "tightship.lost.bytes"

# Names of spans that are no call and no step.
BEGUN: Final = "begun"
CLEANUP: Final = "cleanup"
LEASE: Final = "lease"
LEASE_KEY: Final = "switchboard lease"
"""Of the lease's span below the launch: a step is named lease too."""
