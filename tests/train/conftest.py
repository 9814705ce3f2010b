"""The trainer with torch: collected where torch is installed, which the environment of the other tests has not."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
