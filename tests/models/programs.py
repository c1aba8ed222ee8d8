"""Programs changed for a test."""

from dataclasses import replace
from typing import Any

from segue.models.program import Attention, Program


def with_rope(program: Program, **changes: Any) -> Program:
    """The program with fields of the `Rope` of every attention changed."""
    ops = tuple(
        replace(op, rope=replace(op.rope, **changes)) if isinstance(op, Attention) else op
        for op in program.ops
    )
    return replace(program, ops=ops)
