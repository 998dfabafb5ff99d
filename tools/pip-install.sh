#!/bin/sh
# pip install into /opt/tightship, while the image is built: from /wheelhouse alone where that has wheels.
set -eu
if ls /wheelhouse/*.whl >/dev/null 2>&1; then
    set -- --no-index --find-links /wheelhouse "$@"
fi
exec /opt/tightship/bin/python -m pip install --quiet "$@"
