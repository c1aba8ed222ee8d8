"""SentencePiece's BPE: the definition spelled out, byte fallback, the space before a text, and texts that grow."""

import itertools
import random
from collections.abc import Mapping

import pytest

from segue.errors import ModelFileError, ParameterError
from segue.tokens import Tokenizer
from segue.tokens.incremental import IncrementalEncoder
from segue.weights.model_file import ModelFile
from tests.session.texts import TEXTS

SPACE = "▁"
CONTROL = ["<unk>", "<s>", "</s>", "<|turn|>"]
USER_DEFINED = ["\n\n", "   "]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    "the",
    "hen",
    "then",
    "she",
    "her",
    "here",
    "in",
    "ing",
    "thing",
    ">" + SPACE + "</",
    "...",
    "</",
    "s>",
]
SPELLED = ["</s>", "<s>", "<unk>", "<|turn|>", "<0x41>", "</s", "|turn|", "<0x4", "1>"]
"""What looks like structure, and parts of it."""


def vocabulary(rng: random.Random) -> tuple[list[str], list[float], list[int]]:
    """Letters, all unions on the way to some words, and scores at random, some of them equal."""
    letters = [*"abcdefghijklmnopqrstuvwxyz.,<>/", SPACE]
    unions = {word[i:j] for word in [*WORDS, *(SPACE + word for word in WORDS)] for i in range(len(word)) for j in
              range(i + 2, len(word) + 2)}  # fmt: skip
    unions |= {word[:i] for word in SPELLED[:5] for i in range(2, len(word))}  # the way to each of them
    tokens = [*CONTROL, *USER_DEFINED, *BYTES, *letters, *sorted(unions.difference(letters, CONTROL, BYTES))]
    scores = [float(-rng.randrange(40)) for _ in tokens]
    kinds = [2, 3, 3, 3, *[4] * len(USER_DEFINED), *[6] * len(BYTES)]
    return tokens, scores, kinds + [1] * (len(tokens) - len(kinds))


def model(rng: random.Random, changes: Mapping[str, object] | None = None) -> ModelFile:
    tokens, scores, kinds = vocabulary(rng)
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **(changes or {}),
    }
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return ModelFile(path="small.gguf", size_bytes=0, architecture="llama", metadata=metadata, tensors={})


def spelled_out(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """The definition, step by step: of all neighbours whose union is a token, join those of the best score first."""
    ids = {token: i for i, token in enumerate(tokens) if token not in (*CONTROL, *BYTES)}
    byte_ids = {token: i for i, token in enumerate(tokens) if token in BYTES}
    parts = list(text.replace(" ", SPACE))
    while True:
        unions = [(ids.get(a + b), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        known = [(-scores[token], i) for token, i in unions if token is not None]
        if not known:
            break
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [byte_ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def random_text(rng: random.Random) -> str:
    pieces = [
        *(word.replace(SPACE, " ") for word in [*WORDS, *SPELLED]),
        " ",
        " ",
        "  ",
        "é",
        "漢",
        "\n",
        "🐔",
        "x",
    ]
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(30)))


@pytest.mark.parametrize("seed", range(30))
def test_ids_are_those_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    state = rng.getstate()
    tokens, scores, _ = vocabulary(rng)
    rng.setstate(state)
    tokenizer = Tokenizer.from_model(model(rng, {"tokenizer.ggml.add_space_prefix": False}))
    for _ in range(20):
        text = random_text(rng)
        if not any(token in text for token in USER_DEFINED):
            ids = tokenizer.encode(text)
            assert ids == spelled_out(text, tokens, scores)
            assert tokenizer.decode(ids) == text


def test_text_never_becomes_structure() -> None:
    """All unions on the way to them are tokens, and they themselves would be the best."""
    rng = random.Random(0)
    tokens, scores, _ = vocabulary(rng)
    highest = {"tokenizer.ggml.scores": [1.0 if token in (*CONTROL, *BYTES) else score
                                         for token, score in zip(tokens, scores, strict=True)]}  # fmt: skip
    tokenizer = Tokenizer.from_model(model(random.Random(0), highest))
    for text in SPELLED:
        ids = tokenizer.encode(text)
        assert not {tokens[i] for i in ids}.intersection(CONTROL, [text] if text in BYTES else []), text
        assert tokenizer.decode(ids).lstrip(" ") == text
    assert tokenizer.encode("</s>", parse_special=True) == [2]


def test_a_space_is_put_before_a_text_and_after_special_tokens() -> None:
    tokenizer = Tokenizer.from_model(model(random.Random(1)))
    plain = Tokenizer.from_model(model(random.Random(1), {"tokenizer.ggml.add_space_prefix": False}))
    assert tokenizer.encode("the hen") == plain.encode(" the hen")
    assert tokenizer.encode("the hen", continues=True) == plain.encode("the hen")
    assert tokenizer.encode("the<|turn|>hen", parse_special=True) == [
        *plain.encode(" the"), 3, *plain.encode(" hen"),
    ]  # fmt: skip
    assert tokenizer.encode("the\n\nhen") == [*plain.encode(" the"), 4, *plain.encode(" hen")]
    assert tokenizer.encode("hen", add_special_tokens=True) == [1, *plain.encode(" hen")]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_growing_text_has_the_ids_of_the_whole(seed: int, prefix: bool) -> None:
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_model(model(rng, {"tokenizer.ggml.add_space_prefix": prefix}))
    pieces = [
        word + rng.choice((" ", " ", "  ", "\n\n", "")) for text in TEXTS.values() for word in text.split(" ")
    ]
    encoder = IncrementalEncoder.of(tokenizer)
    text = ""
    for _ in range(300):
        text += rng.choice([*pieces, *WORDS])
        if rng.random() < 0.05:
            text = text[: rng.randrange(len(text) + 1)]
        assert encoder.encode(text) == tokenizer.encode(text)


def test_a_vocabulary_whose_tokens_hold_letter_space_is_never_cut() -> None:
    rng = random.Random(0)
    tokens, scores, kinds = vocabulary(rng)
    changes = {
        "tokenizer.ggml.tokens": [*tokens, f"n{SPACE}t"],
        "tokenizer.ggml.scores": [*scores, 0.0],
        "tokenizer.ggml.token_type": [*kinds, 1],
    }
    assert not Tokenizer.from_model(model(rng, changes)).words_stand_alone
    assert Tokenizer.from_model(model(rng)).words_stand_alone


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ParameterError, match="surrogate"):
        Tokenizer.from_model(model(random.Random(0))).encode("a\ud800")


def test_without_bytes_a_character_is_unknown() -> None:
    rng = random.Random(0)
    tokens, _, kinds = vocabulary(rng)
    changes = {
        "tokenizer.ggml.tokens": [token if kind != 6 else f"byte {i}" for i, (token, kind) in
                                  enumerate(zip(tokens, kinds, strict=True))],
        "tokenizer.ggml.add_space_prefix": False,
    }  # fmt: skip
    assert Tokenizer.from_model(model(rng, changes)).encode("漢") == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.scores": None}, "scores is missing"),
        ({"tokenizer.ggml.scores": [1.0]}, "scores has 1 values for"),
        ({"tokenizer.ggml.scores": "x"}, "must be a list of numbers"),
        ({"tokenizer.ggml.scores": [float("nan")] * 400}, "no number"),
        ({"tokenizer.ggml.add_space_prefix": 1}, "must be true or false"),
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not known; known are gpt2, llama"),
    ],
)
def test_damaged_vocabularies(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_model(model(random.Random(0), changes))
