"""The alphabet of byte-level BPE: every byte as one printable character.

GPT-2's mapping (`bytes_to_unicode` in its published encoder): printable Latin-1 stands for itself, the other
68 bytes follow from U+0100 on in order. A vocabulary is then ordinary text.
"""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in set(_PRINTABLE)]

_BYTE_OF = {byte: byte for byte in _PRINTABLE} | {0x100 + i: byte for i, byte in enumerate(_OTHERS)}
"""Code point in a vocabulary → byte."""


def token_to_bytes(token: str) -> bytes:
    """The bytes of a token's text. A text with a character that is none of the alphabet stands for itself."""
    try:
        return bytes([_BYTE_OF[ord(char)] for char in token])
    except KeyError:
        return token.encode()
