"""A `segue serve` of its own for a measurement."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def serving(model: str, *flags: str) -> Iterator[tuple[str, int]]:
    """Its URL and process id, from when it answers until the block is left."""
    command = [sys.executable, "-m", "segue", "serve", model, "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://\S+", line)
            if found is None:
                sys.exit(line.strip())
            yield found[0], process.pid
        finally:
            process.terminate()
