"""What holds for every test: hypothesis finds examples in its own time, for the machines that run this are shared."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
