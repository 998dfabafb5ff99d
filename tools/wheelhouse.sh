#!/usr/bin/env bash
# Fills wheelhouse/, from which the Dockerfile builds without a network: tools/wheelhouse.sh [VERSION OF PYTHON IN THE BASE]
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
version="${1:-3.11}"
wanted=$("$python" - <<'END'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
print(*project["build-system"]["requires"], *project["project"]["dependencies"], sep="\n")
print(*project["project"]["optional-dependencies"]["dev"], sep="\n")
END
)
machine=$(uname -m)
mapfile -t requirements <<<"$wanted"
"$python" -m pip download --quiet --dest wheelhouse --only-binary=:all: --python-version "$version" \
    --implementation cp --abi "cp${version/./}" --abi abi3 --abi none \
    --platform "manylinux_2_28_$machine" --platform "manylinux_2_17_$machine" --platform "manylinux2014_$machine" \
    --platform any "${requirements[@]}"
