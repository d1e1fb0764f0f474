"""Ties a process to the life of the one that starts it, then becomes the program that it is given:
`python tether.py PARENT_PROCESS_ID PROGRAM ARGUMENT...`.

The kernel then kills the program when its parent goes, even by SIGKILL (Linux; elsewhere it only
becomes the program). Run as a script: it imports nothing of this package.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        # SIGKILL: a service that hangs must go too. The setting outlives exec.
        if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise SystemExit("prctl(PR_SET_PDEATHSIG) was refused")
        if os.getppid() != parent:
            raise SystemExit(f"the parent process {parent} is gone")
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
