"""The embedded engine: a NumPy Qwen3 behind vLLM's wire format.

Matrices of a tiny model are too small for BLAS threads to pay, and an engine shares its node with other processes;
OpenBLAS reads its thread count once, when numpy is first imported, so it is set here, before any module of this
package does that.
"""

import os

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
