"""Script that becomes another program, which the system kills when its parent process ends.

python with_parent.py PROGRAM ARGUMENT ...
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; `exec` keeps it

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(sys.argv[1], sys.argv[1:])
