#!/bin/sh
# Makes the stubs in clients/tightship/v1 from protos/. `--check` makes them
# anew in a temporary folder and fails where the tracked ones differ.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=clients
if [ "${1:-}" = --check ]; then out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; fi
PATH="$(dirname "$(command -v "$python")"):$PATH" "$python" -m grpc_tools.protoc -I protos \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
    protos/tightship/v1/*.proto
[ "$out" = clients ] || {
    for made in "$out"/tightship/v1/*; do cmp "$made" "clients/tightship/v1/$(basename "$made")"; done
    echo "stubs are up to date"
}
