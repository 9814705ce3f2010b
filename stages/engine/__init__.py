"""The embedded engine: a NumPy Qwen3 behind vLLM's wire format.

NumPy and OpenBLAS read their settings once, when numpy is first imported, so they are set here, before any module of
this package does that. One thread: matrices of a tiny model are too small for more to pay, and an engine shares its
node. No huge pages: keys and values have room for every row at full length, and only what is used shall take memory.
"""

import os

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
