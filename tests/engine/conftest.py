"""Thread settings of the engine's tests: OpenMP reads them once, when torch is first imported.

With OpenMP's own default, waiting threads spin, and two test runs on one machine starve each other.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
