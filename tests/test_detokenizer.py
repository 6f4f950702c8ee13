"""Streamed text is that of one decode, in whole characters, for every kind of tokenizer."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from specdec.detokenizer import Detokenizer, decode

BYTES = [f"<0x{b:02X}>" for b in range(256)]
EMOJI = "😀".encode()


# --- tokenizers -----------------------------------------------------------


def byte_letters() -> list[str]:
    """The letters of a byte-level vocabulary, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def fast(model: Any, decoder: Any, **options: Any) -> Any:
    core = Tokenizer(model)
    core.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<é>", special=True)])
    core.add_tokens([AddedToken("<tool>")])
    if decoder is not None:
        core.decoder = decoder
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=core, **options)


def byte_level() -> Any:
    """Every byte, and tokens that end or begin inside a character."""
    letters = byte_letters()
    pieces = [b"the", b" cat", b"  ", b"a\xe4", b"\xbd\xa0b", b"\xa0", b"\xf0\x9f", b"\x98"]
    pieces += ["\ufffd".encode(), "é".encode(), "e\u0301".encode(), EMOJI + b"\xf0", b"\xff\xff"]
    names = [*letters, *("".join(letters[b] for b in p) for p in pieces)]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return fast(models.BPE(vocab, []), decoders.ByteLevel())


def byte_fallback(*decoder: Any) -> Any:
    names = ["<unk>", *BYTES, "▁", "▁▁", "▁hi", "a", "é", "\ufffd", ".", ""]
    model = models.BPE({n: i for i, n in enumerate(names)}, [], unk_token="<unk>")
    return fast(model, decoders.Sequence(list(decoder)))


def llama() -> Any:
    space = decoders.Replace("▁", " ")
    strip = decoders.Strip(" ", 1, 0)
    return byte_fallback(space, decoders.ByteFallback(), decoders.Fuse(), strip)


def gemma() -> Any:
    return byte_fallback(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())


def metaspace() -> Any:
    return byte_fallback(decoders.ByteFallback(), decoders.Metaspace())


def words(**options: Any) -> Any:
    names = ["<unk>", "the", "cat", ".", "\ufffd", "é", "n't", "\u0301"]
    model = models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>")
    return fast(model, None, **options)


def word_pieces() -> Any:
    names = ["[UNK]", "the", "##re", "cat", "##s", ".", "'", "##'", "do", "not", "n", "##t"]
    model = models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]")
    return fast(model, decoders.WordPiece())


def word_ends() -> Any:
    names = ["<unk>", "the</w>", "ca", "t</w>", "s", "é</w>"]
    model = models.BPE({n: i for i, n in enumerate(names)}, [], unk_token="<unk>")
    return fast(model, decoders.BPEDecoder("</w>"))


class Slow(PreTrainedTokenizer):  # type: ignore[misc, unused-ignore]
    """Written in Python: bytes are tokens, and decode as sentencepiece decodes them."""

    def __init__(self, **options: Any) -> None:
        self.names = ["<unk>", *BYTES, "▁hi", "a"]
        make: Any = super().__init__
        make(unk_token="<unk>", eos_token="<eos>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self.names)

    def get_vocab(self) -> dict[str, int]:
        return {n: i for i, n in enumerate(self.names)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.names.index(token) if token in self.names else 0

    def _convert_id_to_token(self, index: int) -> str:
        return self.names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        text, run = "", b""
        for token in [*tokens, ""]:
            if token in BYTES:
                run += bytes([BYTES.index(token)])
            else:
                text, run = text + one_by_one(run) + token.replace("▁", " "), b""
        return text


def one_by_one(run: bytes) -> str:
    """UTF-8 with a U+FFFD for every single byte that is wrong."""
    text = ""
    while run:
        for length in (1, 2, 3, 4):
            try:
                text, run = text + run[:length].decode(), run[length:]
                break
            except UnicodeDecodeError:
                continue
        else:
            text, run = text + "\ufffd", run[1:]
    return text


KINDS: dict[str, Callable[[], Any]] = {
    "byte_level": byte_level,
    "llama": llama,
    "gemma": gemma,
    "metaspace": metaspace,
    "words": words,
    "word_pieces": word_pieces,
    "word_ends": word_ends,
    "slow": Slow,
}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {kind: make() for kind, make in KINDS.items()}


each_kind = pytest.mark.parametrize("kind", KINDS)


# --- what is asked of it --------------------------------------------------


def pieces(tokenizer: Any, tokens: list[int], skip: bool = True) -> Iterator[str]:
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    for token in tokens:
        yield stream.push(token)
    yield stream.flush()


def ids_of(tokenizer: Any, size: int, *, wrong: bool) -> st.SearchStrategy[list[int]]:
    """Ids of a tokenizer, those of bytes in the middle of characters and special ones often."""
    every = sorted(tokenizer.get_vocab().values())
    letters = byte_letters()
    often = [letters[b] for b in (*EMOJI, 0xE4, 0xBD, 0xA0, 0xFF, 0x20, 0x41)]
    often += [BYTES[b] for b in (*EMOJI, 0xE4, 0xBD, 0xA0, 0xFF, 0x20, 0x41)]
    often += ["<eos>", "<é>", "<tool>", "▁", "▁hi", "a", "\ufffd", ""]
    some = [i for name, i in tokenizer.get_vocab().items() if name in often]
    outside = st.sampled_from([max(every) + 1, 10**6, -1] if wrong else every)
    one = st.one_of(st.sampled_from(some or every), st.sampled_from(every), outside)
    return st.lists(one, max_size=size)


@each_kind
@given(data=st.data(), skip=st.booleans())
def test_streamed_text_is_the_text_of_one_decode(
    tokenizers: dict[str, Any], kind: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(ids_of(tokenizer, 60, wrong=False))
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, ids, skip)) == expected
    assert decode(tokenizer, ids, skip_special_tokens=skip) == expected


@each_kind
@given(data=st.data(), skip=st.booleans())
def test_text_that_was_given_begins_whatever_comes_later(
    tokenizers: dict[str, Any], kind: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(ids_of(tokenizer, 30, wrong=False))
    later = data.draw(ids_of(tokenizer, 8, wrong=False))
    *given_out, _ = pieces(tokenizer, ids, skip)
    whole = tokenizer.decode(ids + later, skip_special_tokens=skip)
    assert whole.startswith("".join(given_out))


@each_kind
@given(data=st.data())
def test_ids_outside_the_vocabulary_give_no_text(
    tokenizers: dict[str, Any], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(ids_of(tokenizer, 30, wrong=True))
    known = [i for i in ids if 0 <= i <= max(tokenizer.get_vocab().values())]
    expected = tokenizer.decode(known, skip_special_tokens=True)
    assert "".join(pieces(tokenizer, ids)) == expected
    assert decode(tokenizer, ids, skip_special_tokens=True) == expected


def of_bytes(tokenizer: Any, text: bytes) -> list[int]:
    vocab = tokenizer.get_vocab()
    names = BYTES if BYTES[0] in vocab else byte_letters()
    return [vocab[names[b]] for b in text]


def test_a_character_comes_whole_with_its_last_byte() -> None:
    tokenizer = byte_level()
    ids = of_bytes(tokenizer, EMOJI + "é".encode())
    assert list(pieces(tokenizer, ids)) == ["", "", "", "😀", "", "é", ""]


def test_a_combining_mark_comes_after_its_letter() -> None:
    tokenizer = byte_level()
    ids = of_bytes(tokenizer, "e\u0301".encode())
    assert list(pieces(tokenizer, ids)) == ["e", "", "\u0301", ""]


def test_a_special_token_inside_a_character_is_skipped() -> None:
    tokenizer = byte_level()
    (eos,) = tokenizer.convert_tokens_to_ids(["<eos>"])
    first, *rest = of_bytes(tokenizer, "é".encode())
    assert list(pieces(tokenizer, [first, eos, *rest])) == ["", "", "é", ""]


def test_an_unfinished_character_is_left_for_the_end() -> None:
    tokenizer = byte_level()
    stream = Detokenizer(tokenizer, skip_special_tokens=True)
    assert [stream.push(t) for t in of_bytes(tokenizer, b"a" + EMOJI[:2])] == ["a", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_replacement_character_that_is_meant_comes_with_the_next_token() -> None:
    tokenizer = words()
    ids = tokenizer.convert_tokens_to_ids(["the", "\ufffd", "cat"])
    assert list(pieces(tokenizer, ids)) == ["the", " ", "\ufffd cat", ""]


@pytest.mark.parametrize("kind", ["byte_level", "llama", "slow"])
def test_wrong_bytes_do_not_block_the_stream(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]
    *given_out, _ = pieces(tokenizer, of_bytes(tokenizer, b"\xff" * 100))
    assert len("".join(given_out)) == 97


def test_bytes_in_a_row_wait_for_the_end_of_the_row() -> None:
    # for the decoder one wrong byte turns all of them into U+FFFD
    tokenizer = llama()
    row = of_bytes(tokenizer, "é\n".encode())
    (end,) = tokenizer.convert_tokens_to_ids(["a"])
    (wrong,) = of_bytes(tokenizer, b"\xff")
    assert list(pieces(tokenizer, [*row, end])) == ["", "", "", "é\na", ""]
    assert "".join(pieces(tokenizer, [*row, wrong])) == "\ufffd" * 4


def test_a_wrong_byte_counts_for_all_that_follow_in_the_row() -> None:
    tokenizer = llama()
    row = of_bytes(tokenizer, b"\xff" + "é".encode() * 20)
    assert "".join(pieces(tokenizer, row)) == "\ufffd" * 41


def test_tokens_without_text_do_not_push_the_beginning_out_of_sight() -> None:
    tokenizer = llama()  # which drops a space only at the beginning of all
    ids = tokenizer.convert_tokens_to_ids(["▁hi", *[""] * 30, "▁hi"])
    assert "".join(pieces(tokenizer, ids)) == "hi hi"


def test_pending_text_is_that_of_the_whole_characters_in_the_row() -> None:
    tokenizer = llama()
    stream = Detokenizer(tokenizer, skip_special_tokens=True)
    pending = []
    for token in [*of_bytes(tokenizer, "é\n😀".encode()), *of_bytes(tokenizer, b"\xff")]:
        stream.push(token)
        pending.append(stream.pending)
    assert pending == ["", "é", "é\n", "é\n", "é\n", "é\n", "é\n😀", ""]


def test_spaces_are_not_cleaned_up_behind_text_that_was_given() -> None:
    tokenizer = words(clean_up_tokenization_spaces=True)
    ids = tokenizer.convert_tokens_to_ids(["the", ".", "cat", "n't"])
    assert tokenizer.decode(ids) == "the. catn't"
    assert "".join(pieces(tokenizer, ids)) == "the . cat n't"
    assert decode(tokenizer, ids, skip_special_tokens=True) == "the . cat n't"


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.decoded: list[int] = []

    def decode(self, tokens: list[int], **options: Any) -> str:
        self.decoded.append(len(tokens))
        return str(self.tokenizer.decode(tokens, **options))

    def convert_ids_to_tokens(self, token: int) -> Any:
        return self.tokenizer.convert_ids_to_tokens(token)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "a") for kind in ("byte_level", "llama", "slow")),
        *((kind, "<eos>") for kind in KINDS),
        ("byte_level", "\u0122"),  # how 0x80 is written
        ("llama", "<0xFF>"),
        ("slow", "<0xFF>"),
        ("llama", "▁"),
    ],
)
def test_a_token_costs_the_same_however_many_came_before(
    tokenizers: dict[str, Any], kind: str, name: str
) -> None:
    counting = Counting(tokenizers[kind])
    token = counting.tokenizer.convert_tokens_to_ids(name)
    assert counting.tokenizer.convert_ids_to_tokens(token) == name
    (*_,) = pieces(counting, [token] * 1000)
    assert max(counting.decoded) <= 20
    assert sum(counting.decoded) < 40 * 1000


def test_bytes_in_a_row_are_decoded_once() -> None:
    counting = Counting(llama())
    row = of_bytes(counting.tokenizer, EMOJI * 100)
    (end,) = counting.tokenizer.convert_tokens_to_ids(["a"])
    (*_,) = pieces(counting, [*row, end])
    assert sum(counting.decoded) < 500


def test_the_letters_of_the_byte_level_vocabulary_are_the_librarys() -> None:
    assert sorted(byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
