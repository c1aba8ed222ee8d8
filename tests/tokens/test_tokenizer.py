"""Encoding and decoding: round trips, special tokens, damaged files."""

import threading
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import ModelFileError, ParameterError
from segue.tokens import Tokenizer
from segue.tokens.byte_level import token_to_bytes
from segue.tokens.pre_tokenizers import PRE_TOKENIZERS
from segue.weights.gguf import load_gguf
from segue.weights.model_file import ModelFile, Tensor, TensorType
from tests.tokens.small import BYTES, KINDS, MERGES, TOKENS, metadata, small_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.lists(
    st.sampled_from(["<|im_end|>", "</think>", "abc", " ", "\n", "é", "12", "<", "|>", "👩‍👩‍👧", "\x00"])
).map("".join)


def test_the_alphabet_covers_every_byte_once() -> None:
    assert sorted(token_to_bytes(char)[0] for char in BYTES) == list(range(256))
    assert all(len(token_to_bytes(char)) == 1 for char in BYTES)


def test_text_outside_the_alphabet_stands_for_itself() -> None:
    assert token_to_bytes("[PAD 1]") == b"[PAD 1]"
    assert token_to_bytes("漢a") == "漢a".encode()


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=TEXTS)
def test_decode_undoes_encode(pre: str, text: str) -> None:
    tokenizer = _with_pre(pre)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode(text, parse_special=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(text=TEXTS)
def test_text_makes_no_control_tokens_unless_asked(text: str) -> None:
    tokenizer = _with_pre("smollm")
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text))


@given(ids=st.lists(st.integers(0, len(TOKENS) - 1)))
def test_decode_joins_the_bytes_of_tokens(ids: list[int]) -> None:
    tokenizer = _with_pre("smollm")
    whole = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == whole.decode(errors="replace")
    assert tokenizer.decode(ids) == tokenizer.decode(
        [i for i in ids if i not in tokenizer.special_ids], skip_special_tokens=False
    )


def test_merges_in_order_and_digits_one_by_one(small: Tokenizer) -> None:
    assert _texts(small, "abc  abab 12hi") == ["abc", "Ġ", "Ġ", "ab", "ab", "Ġ", "1", "2", "hi"]
    assert _texts(_with_pre("gpt-2"), "12") == ["12"]


def test_ignore_merges_takes_a_whole_piece() -> None:
    # "stop" is a token that these merges never reach: its parts merge into "t o" first.
    tokens = [*TOKENS, "to"]
    changes: dict[str, object] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*KINDS, 1],
        "tokenizer.ggml.merges": ["t o", *MERGES],
    }
    assert _texts(small_tokenizer(changes), "stop") == ["s", "to", "p"]
    changes["tokenizer.ggml.pre"] = "llama-bpe"
    assert _texts(small_tokenizer(changes), "stop") == ["stop"]


def test_control_tokens_are_parsed_only_when_asked(small: Tokenizer) -> None:
    text = "hi<|im_end|><|im_end|>"
    assert small.encode(text, parse_special=True)[-2:] == [1, 1]
    assert 1 not in small.encode(text)
    assert small.decode(small.encode(text, parse_special=True)) == "hi"
    assert small.decode(small.encode(text, parse_special=True), skip_special_tokens=False) == text


def test_user_defined_tokens_are_always_taken_whole(small: Tokenizer) -> None:
    assert small.encode("ab</think>ab") == small.encode("ab</think>ab", parse_special=True)
    assert _texts(small, "ab</think>ab") == ["ab", "</think>", "ab"]
    assert small.decode([TOKENS.index("</think>")]) == "</think>"


def test_a_special_token_stands_for_its_text_as_it_is_written() -> None:
    tokens = [*TOKENS, "<Größe>"]
    changes: dict[str, object] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [*KINDS, 4]}
    tokenizer = small_tokenizer(changes)
    assert tokenizer.encode("a<Größe>")[-1] == len(TOKENS)
    assert tokenizer.decode(tokenizer.encode("a<Größe>")) == "a<Größe>"


def test_of_a_merge_that_is_there_twice_the_first_counts() -> None:
    changes: dict[str, object] = {
        "tokenizer.ggml.tokens": [*TOKENS, "bc"],
        "tokenizer.ggml.token_type": [*KINDS, 1],
        "tokenizer.ggml.merges": ["a b", "b c", "a b"],
    }
    assert _texts(small_tokenizer(changes), "abc", [*TOKENS, "bc"]) == ["ab", "c"]


def test_of_overlapping_special_tokens_the_longer_is_found_first() -> None:
    tokens = [*TOKENS, "aXb", "bYYYc"]
    tokenizer = small_tokenizer(
        {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [*KINDS, 4, 4]}
    )
    assert _texts(tokenizer, "aXbYYYc", tokens) == ["a", "X", "bYYYc"]


def test_a_byte_without_a_token_is_left_out_and_still_separates() -> None:
    kept = [(token, kind) for token, kind in zip(TOKENS, KINDS, strict=True) if token != "Ā"]
    tokens = [token for token, _ in kept]
    tokenizer = small_tokenizer(
        {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [kind for _, kind in kept]}
    )
    assert _texts(tokenizer, "!\x00!", tokens) == ["!", "!"]
    assert _texts(tokenizer, "!!", tokens) == ["!!"]
    assert tokenizer.vocab_size == len(tokens)


def test_bos_and_eos_are_added_where_the_model_wants_them() -> None:
    plain = small_tokenizer()
    assert plain.encode("hi", add_special_tokens=True) == plain.encode("hi")
    both = small_tokenizer({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    assert both.encode("hi", add_special_tokens=True) == [0, *plain.encode("hi"), 2]
    assert both.encode("hi") == plain.encode("hi")
    assert _with_pre("llama-bpe").encode("", add_special_tokens=True) == [0]


def test_ends_of_a_turn_are_known_by_id_and_by_name() -> None:
    assert small_tokenizer().eos_token_ids == {1, 2}
    assert small_tokenizer({"tokenizer.ggml.eot_token_id": 4}).eos_token_ids == {1, 2, 4}
    assert small_tokenizer({"tokenizer.ggml.eom_token_id": 0}).eos_token_ids == {0, 1, 2}
    nothing = small_tokenizer({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.bos_token_id": None})
    assert nothing.eos_token_ids == {1}
    assert nothing.bos_token_id is None
    assert nothing.bos_token == nothing.eos_token == ""


def test_an_end_of_turn_is_a_control_token_whatever_the_file_says() -> None:
    tokenizer = small_tokenizer({"tokenizer.ggml.token_type": None})
    assert tokenizer.special_ids == {1}
    assert 1 not in tokenizer.encode("<|im_end|>")


def test_a_lone_surrogate_is_an_error(small: Tokenizer) -> None:
    with pytest.raises(ParameterError, match="surrogate"):
        small.encode("a\ud800b")


@pytest.mark.parametrize("token_id", [-1, len(TOKENS)])
def test_an_unknown_id_is_an_error(small: Tokenizer, token_id: int) -> None:
    with pytest.raises(ParameterError, match="no token id"):
        small.decode([token_id])


DAMAGE: list[tuple[str, object, str]] = [
    ("tokenizer.ggml.model", None, "missing"),
    ("tokenizer.ggml.model", 3, "must be a string"),
    ("tokenizer.ggml.model", "t5", "known are gpt2"),
    ("tokenizer.ggml.pre", None, "missing"),
    ("tokenizer.ggml.pre", "no\nsuch", "smollm"),
    ("tokenizer.ggml.tokens", None, "missing"),
    ("tokenizer.ggml.tokens", "abc", "list of strings"),
    ("tokenizer.ggml.tokens", [*TOKENS[:-1], 7], "list of strings"),
    ("tokenizer.ggml.tokens", [], "empty"),
    ("tokenizer.ggml.tokens", [*TOKENS[:-1], "a"], "'a' twice"),
    ("tokenizer.ggml.tokens", ["", *TOKENS[1:]], "no text"),
    ("tokenizer.ggml.tokens", TOKENS[:-1], "token_type has"),
    ("tokenizer.ggml.token_type", [*KINDS, 1], "token_type has"),
    ("tokenizer.ggml.token_type", [*KINDS[:-1], 9], "unknown value 9"),
    ("tokenizer.ggml.token_type", [*KINDS[:-1], 1.5], "list of integers"),
    ("tokenizer.ggml.merges", None, "missing"),
    ("tokenizer.ggml.merges", [*MERGES, 1], "list of strings"),
    ("tokenizer.ggml.merges", [*MERGES, "ab"], "not two tokens"),
    ("tokenizer.ggml.merges", [*MERGES, "a b c"], "not two tokens"),
    ("tokenizer.ggml.merges", [*MERGES, " b"], "not two tokens"),
    ("tokenizer.ggml.merges", [*MERGES, "a nosuch"], "nosuch"),
    ("tokenizer.ggml.merges", [*MERGES, "a z"], "az"),
    ("tokenizer.ggml.merges", [*MERGES, "\x1b[2J \0"], r"\\x1b\[2J"),
    ("tokenizer.ggml.bos_token_id", len(TOKENS), "no id"),
    ("tokenizer.ggml.eos_token_id", -1, "no id"),
    ("tokenizer.ggml.eos_token_id", "2", "must be an integer"),
    ("tokenizer.ggml.eot_token_id", True, "must be an integer"),
    ("tokenizer.ggml.add_bos_token", 1, "true or false"),
    ("tokenizer.chat_template", 1, "must be a string"),
    ("llama.vocab_size", 5, "vocab_size says .5."),
]


@pytest.mark.parametrize(("key", "value", "why"), DAMAGE)
def test_a_damaged_file_is_an_error_of_one_line(key: str, value: object, why: str) -> None:
    with pytest.raises(ModelFileError, match=why) as caught:
        small_tokenizer({key: value})
    assert str(caught.value).startswith("small.gguf: ")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_token_to_add_must_exist(name: str) -> None:
    with pytest.raises(ModelFileError, match=f"no {name}_token_id"):
        small_tokenizer({f"tokenizer.ggml.add_{name}_token": True, f"tokenizer.ggml.{name}_token_id": None})


def test_the_embedding_must_have_a_row_for_each_token() -> None:
    embedding = Tensor("token_embd.weight", (7, 4), TensorType.F32, np.zeros(112, np.uint8))
    model = ModelFile("small.gguf", 0, "llama", metadata(), {embedding.name: embedding})
    with pytest.raises(ModelFileError, match="the embedding 7 rows"):
        Tokenizer.from_model(model)


@cache
def _with_pre(pre: str) -> Tokenizer:
    return small_tokenizer({"tokenizer.ggml.pre": pre})


def _texts(tokenizer: Tokenizer, text: str, tokens: list[str] | None = None) -> list[str]:
    return [(tokens or [*TOKENS, "to"])[i] for i in tokenizer.encode(text)]


def test_other_threads_run_while_a_long_text_is_encoded(tiny_path: Path) -> None:
    tokenizer = Tokenizer.from_model(load_gguf(tiny_path))
    text = "the hen said on and on, " * 15_000
    num_ticks, is_over = 0, threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not is_over.wait(0.0005):
            num_ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    before = num_ticks
    tokenizer.encode(text)
    during = num_ticks - before
    is_over.set()
    ticker.join()
    assert during > 5
