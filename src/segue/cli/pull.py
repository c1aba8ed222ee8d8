"""`segue pull`: a model into the cache."""

import sys

from segue.weights import hub


def pull(alias: str) -> None:
    """Downloads the model unless it is there; prints its path on stdout, progress on stderr."""
    if not sys.stderr.isatty():
        print(hub.pull(alias))
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(alias, total=None)
        path = hub.pull(
            alias, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    print(path)
