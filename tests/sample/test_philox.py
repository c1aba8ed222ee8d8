"""Philox against the known answers of Random123 (kat_vectors), in Python and in C++."""

import pytest

from segue import _native
from segue.sample.philox import philox4x32, uniform_u64

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == expected
    assert tuple(_native.philox4x32(counter, key)) == expected


def test_uniform_takes_key_and_counter_low_word_first() -> None:
    seed, position = 0x0123456789ABCDEF, 77
    words = philox4x32((position, 0, 0, 0), (0x89ABCDEF, 0x01234567))
    assert uniform_u64(seed, position) == words[0] + (words[1] << 32)
