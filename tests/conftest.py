"""Before anything imports torch: OpenMP threads that wait passively, as in the services."""

from outrider.serving.threads import set_threads

set_threads(2, spin_count=0)
