"""Programs changed for a test."""

from dataclasses import replace
from typing import Any

from segue.models.program import Attention, Program, Rope


def rope_of(program: Program) -> Rope:
    """That of all attentions."""
    (rope,) = {op.rope for op in program.attentions}
    assert rope is not None
    return rope


def with_rope(program: Program, **changes: Any) -> Program:
    """The program with fields of the `Rope` of every attention changed."""
    rope = replace(rope_of(program), **changes)
    ops = tuple(replace(op, rope=rope) if isinstance(op, Attention) else op for op in program.ops)
    return replace(program, ops=ops)
