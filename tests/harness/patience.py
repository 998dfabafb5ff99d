"""How patient tests are. Imports nothing but the standard library: processes without an environment of ours use it."""

from __future__ import annotations

import os

PATIENCE = int(os.environ.get("TIGHTSHIP_TEST_PATIENCE", "1"))
"""How many times longer things may take here: an emulated machine is slow."""
