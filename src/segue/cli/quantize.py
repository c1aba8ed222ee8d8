"""`segue quantize`: a model of floats in fewer bits."""

from pathlib import Path

from segue.cli.progress import byte_progress
from segue.display import escape
from segue.weights.hub import resolve_model
from segue.weights.model_file import TensorType
from segue.weights.quantize_model import quantize_model


def quantize(source: str, target: str, kind: str, *, force: bool) -> None:
    """Writes `target`, its matrices in `kind`, such as q4_0; prints its size on stdout, progress on stderr."""
    with byte_progress(target) as progress:
        before, after = quantize_model(
            resolve_model(source),
            Path(target),
            TensorType[kind.upper()],
            replace=force,
            progress=progress,
        )
    print(f"{escape(target)}: {after:,} bytes, {after / before:.0%} of {escape(source)}")
