"""A rank's first and last lines: tie its life to the launcher's, become the train module, end without teardown.

torchrun starts every rank in a session of its own, so a launcher that is killed (SIGKILL, out of memory) cannot end
them, and they would hold cores or GPUs until a collective times out. The kernel can end them, but a process has to ask
for that itself; here every train module gets it, before it imports anything.

A run that has finished must not fail afterwards: while Python takes its libraries apart, a C++ thread of theirs can abort the
process ("terminate called without an active exception", seen once in some hundred runs on CPU, after "Process group
destroyed"), and torchrun then calls the run failed. So a rank that has come to its end leaves right after its exit handlers.

Not here: starting ranks (launch.py), what a rank does (train.py).
"""

import atexit
import ctypes
import os
import runpy
import signal
import sys
import threading

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
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise  # a message, which Python prints
        code = end.code or 0
    end_without_teardown(code)


def end_without_teardown(code: int) -> None:
    """End this process with an exit code after what Python does first: wait for threads, run exit handlers, flush."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
