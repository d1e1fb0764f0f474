"""How many threads the numeric libraries of this process use, and how they wait.

Must run before torch is imported: OpenMP reads its settings once. Several services share a
machine's cores, and OpenMP's default of spinning while it waits makes each of them pay for the
others.
"""

import os
import sys


def set_threads(count: int, spin_count: int) -> None:
    """Sets thread count and waiting of OpenMP and the BLAS libraries. `count` 0 = all cores.

    An idle thread looks `spin_count` times for work before it sleeps. A short spin saves waking it
    up for the next layer; a long one takes the cores from the other services.
    """
    assert "torch" not in sys.modules, "torch has read its OpenMP settings already"
    threads = str(count or len(os.sched_getaffinity(0)))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = threads
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["GOMP_SPINCOUNT"] = str(spin_count)
