"""The command as a process: when it began and how it ends.

exit code 0    done
          1    the request was right and could not be carried out
          2    the command line, a file or a parameter is wrong
        130    Ctrl-C
        141    the reader of stdout went away
"""

import time

START_S = time.perf_counter()
"""When the command began, for "time to first token"."""

EXIT_FAILED, EXIT_INTERRUPTED, EXIT_CLOSED_PIPE = 1, 130, 141
"""Beside those of `SegueError`."""
