"""What a user is shown of an error."""

import pickle

import pytest

from segue.errors import FailedError, ModelFileError, ParameterError, SegueError


@pytest.mark.parametrize(
    "error",
    [
        ModelFileError("a\x1b[2J\nb\0\x9b\u202e"),
        FailedError("a\n\tb"),
        ParameterError("stop", "x\x1b", "a\x1b\nb"),
    ],
)
def test_a_message_is_one_line_that_can_be_printed(error: SegueError) -> None:
    assert str(error).isprintable()
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_large_value_is_not_repeated() -> None:
    error = ParameterError("json", "x" * 150_000, "is too long")
    assert len(str(error)) < 300
    assert len(str(error.value)) == 150_000
