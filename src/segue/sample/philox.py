"""Philox4x32-10, the counter-based generator behind every draw: random numbers without state.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The words for a
position depend on nothing but the seed and the position, so a draw is the same in whatever order and
however often it is made.
"""

Words4 = tuple[int, int, int, int]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Ten rounds: four random 32-bit words from a 128-bit counter and a 64-bit key, low word first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform_u64(seed: int, position: int) -> int:
    """The uniform number in [0, 2^64) that the token for `position` is drawn with."""
    words = philox4x32((position, 0, 0, 0), (seed & _MASK, seed >> 32))
    return words[1] << 32 | words[0]
