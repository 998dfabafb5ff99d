#!/bin/sh
# A first look: a pair of services in a directory of its own, one command under a memory limit, and what is left of it.
set -eu
TIGHTSHIP_RUN_DIR=$(mktemp -d /tmp/tightship-first-run.XXXXXX)
export TIGHTSHIP_RUN_DIR
trap 'tightship down >/dev/null 2>&1 || true; rm -rf "$TIGHTSHIP_RUN_DIR"' EXIT

echo '$ tightship up -d'
tightship up -d

echo
echo '$ tightship run --verbose --spec "memory { limit: 67108864 }" /first -- sh -c "echo hello; exit 7"'
status=0
tightship run --verbose --spec "memory { limit: 67108864 }" /first -- sh -c "echo hello; exit 7" || status=$?
echo '$ echo $?'
echo "$status"
[ "$status" = 7 ]

echo
echo '$ tightship audit'
tightship audit

echo
echo '$ tightship down'
tightship down
