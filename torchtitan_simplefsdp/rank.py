"""A rank's first lines: tie its life to the launcher's, then become the train module.

torchrun starts every rank in a session of its own, so a launcher that is killed (SIGKILL, out of memory) cannot end
them, and they would hold cores or GPUs until a collective times out. The kernel can end them, but a process has to ask
for that itself; here every train module gets it, before it imports anything.

Not here: starting ranks (launch.py), what a rank does (train.py).
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_launcher(launcher_pid: int) -> None:
    """Have the kernel kill this process when the launcher ends, however it ends.

    The kernel watches the launcher's thread that started this process: its main thread, in which torchrun runs.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:  # it ended before the line above
        sys.exit(f"rank: the launcher (process {launcher_pid}) has ended.")


def main(launcher_pid: str, module: str, *module_args: str) -> None:
    # Ctrl-C ends a rank as SIGTERM does, without a traceback; the launcher says what happened.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_launcher(int(launcher_pid))
    sys.argv = [module, *module_args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
