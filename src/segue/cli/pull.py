"""`segue pull`: a model into the cache."""

from segue.cli.progress import byte_progress
from segue.weights import hub


def pull(alias: str) -> None:
    """Downloads the model unless it is there; prints its path on stdout, progress on stderr."""
    with byte_progress(alias) as progress:
        path = hub.pull(alias, progress=progress)
    print(path)
