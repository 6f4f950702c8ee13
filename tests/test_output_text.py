"""One completion's text: cut at stops, never taken back, however its tokens come."""

import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specdec.errors import PromptError
from specdec.output_text import OutputText, StopMatch

Reason = Literal["stop", "length"]

EMOJI = "😀".encode()
LETTERS = [*range(33, 127), *range(161, 173), *range(174, 256)]


# --- tokenizers -----------------------------------------------------------


def letter(byte: int) -> str:
    """How a byte-level vocabulary writes a byte."""
    if byte in LETTERS:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in LETTERS].index(byte))


def tokenizer_of(names: Sequence[str], decoder: Any) -> Any:
    core = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, []))
    core.decoder = decoder
    core.add_special_tokens([AddedToken("<eos>", special=True)])
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=core)


class Told(NamedTuple):
    """A tokenizer that has a token for each of some pieces, and their ids."""

    tokenizer: Any
    ids: list[int]


def told(*pieces: str | bytes) -> Told:
    """A byte-level tokenizer and the tokens for these pieces; `<eos>` is special."""
    raw = [p.encode() if isinstance(p, str) else p for p in pieces]
    names = ["".join(letter(b) for b in p) if p != b"<eos>" else "<eos>" for p in raw]
    plain = dict.fromkeys(n for n in names if n != "<eos>")
    tokenizer = tokenizer_of([*plain], decoders.ByteLevel())
    return Told(tokenizer, tokenizer.convert_tokens_to_ids(names))


def told_in_bytes(*pieces: str | bytes) -> Told:
    """A tokenizer with byte fallback; pieces that are bytes become a token for each byte."""
    names = [
        n for p in pieces for n in ([p] if isinstance(p, str) else [f"<0x{b:02X}>" for b in p])
    ]
    plain = dict.fromkeys(n for n in names if n != "<eos>")
    tokenizer = tokenizer_of(
        [*plain], decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    )
    return Told(tokenizer, tokenizer.convert_tokens_to_ids(names))


def output(
    tokenizer: Any,
    *stop: str,
    include: bool = False,
    skip: bool = True,
    min_tokens: int = 0,
    detokenize: bool = True,
) -> OutputText:
    return OutputText(
        tokenizer,
        stop=stop,
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
        min_tokens=min_tokens,
        detokenize=detokenize,
    )


# --- stop strings ---------------------------------------------------------


def test_a_stop_string_over_several_tokens_cuts_the_text_and_the_tokens() -> None:
    tokenizer, ids = told("say ", "S", "TO", "P it", " now")
    text = output(tokenizer, "STOP")
    assert text.append(ids) == StopMatch(kept=4, stop="STOP")
    assert text.text == "say "


def test_a_stop_string_over_several_steps_is_never_shown() -> None:
    tokenizer, ids = told("say ", "S", "TO", "P it")
    text = output(tokenizer, "STOP")
    shown = []
    for token in ids[:3]:
        assert text.append([token]) is None
        shown.append(text.text)
    assert shown == ["say ", "say ", "say "]
    assert text.append(ids[3:]) == StopMatch(kept=1, stop="STOP")
    assert text.text == "say "


def test_text_that_only_looked_like_a_stop_string_is_shown_again() -> None:
    tokenizer, ids = told("say ", "S", "TO", "L", "EN")
    text = output(tokenizer, "STOP")
    taken = []
    for token in ids:
        text.append([token])
        taken.append(text.take())
    assert taken == ["say ", "", "", "STOL", "EN"]


def test_held_back_text_is_released_at_the_end() -> None:
    tokenizer, ids = told("say ", "STO")
    text = output(tokenizer, "STOP")
    assert text.append(ids, "length") is None
    assert text.text == "say STO"


def test_the_token_that_holds_a_stop_string_is_kept_and_its_text_is_cut() -> None:
    tokenizer, ids = told("a ", "foo STOP bar", "b")
    text = output(tokenizer, "STOP")
    assert text.append(ids) == StopMatch(kept=2, stop="STOP")
    assert text.text == "a foo "


def test_included_stop_string_ends_the_text_without_what_its_token_has_after_it() -> None:
    tokenizer, ids = told("a ", "foo STOP bar", "b")
    text = output(tokenizer, "STOP", include=True)
    assert text.append(ids) == StopMatch(kept=2, stop="STOP")
    assert text.text == "a foo STOP"


def test_nothing_is_held_back_for_a_stop_string_that_is_included() -> None:
    tokenizer, ids = told("a ", "S", "TO", "P!")
    text = output(tokenizer, "STOP", include=True)
    taken = []
    for token in ids:
        text.append([token])
        taken.append(text.take())
    assert taken == ["a ", "S", "TO", "P"]


def test_the_very_first_token_can_complete_a_stop_string() -> None:
    tokenizer, ids = told("\n\n", "a")
    text = output(tokenizer, "\n\n")
    assert text.append(ids) == StopMatch(kept=1, stop="\n\n")
    assert text.text == ""


@pytest.mark.parametrize(
    ("stops", "pieces", "match", "shown"),
    [
        (["ab", "aab"], ["xa", "a", "b"], StopMatch(3, "aab"), "x"),
        (["aab", "ab"], ["xb", "a", "b"], StopMatch(3, "ab"), "xb"),
        (["abcd", "bc"], ["a", "b", "c", "d"], StopMatch(3, "bc"), "a"),
        (["abcd", "bc"], ["abcd"], StopMatch(1, "bc"), "a"),
        (["later", "a"], ["xa later"], StopMatch(1, "a"), "x"),
    ],
    ids=["longer", "shorter", "inside", "inside, one token", "two in a token"],
)
def test_the_stop_string_that_completes_first_counts(
    stops: list[str], pieces: list[str], match: StopMatch, shown: str
) -> None:
    tokenizer, ids = told(*pieces)
    text = output(tokenizer, *stops)
    assert text.append(ids) == match
    assert text.text == shown


def test_a_stop_string_may_be_a_character_of_several_tokens() -> None:
    tokenizer, ids = told("a", EMOJI[:2], EMOJI[2:3], EMOJI[3:] + b"b", "c")
    text = output(tokenizer, "😀")
    assert text.append(ids) == StopMatch(kept=4, stop="😀")
    assert text.text == "a"


def test_a_character_that_shares_bytes_with_a_stop_string_is_none() -> None:
    tokenizer, ids = told("a", EMOJI[:3], b"\x81", "!")
    text = output(tokenizer, "😀")
    assert text.append(ids, "length") is None
    assert text.text == "a😁!"


def test_a_stop_string_may_begin_at_a_combining_mark() -> None:
    tokenizer, ids = told("e", "\u0301", "x")
    text = output(tokenizer, "\u0301x")
    assert text.append(ids) == StopMatch(kept=3, stop="\u0301x")
    assert text.text == "e"


def test_a_special_token_between_the_halves_of_a_stop_string_is_skipped() -> None:
    tokenizer, ids = told("a", "ST", "<eos>", "OP", "b")
    text = output(tokenizer, "STOP")
    assert text.append(ids) == StopMatch(kept=4, stop="STOP")
    assert text.text == "a"


def test_a_special_token_that_is_shown_comes_between_the_halves() -> None:
    tokenizer, ids = told("a", "ST", "<eos>", "OP", "b")
    text = output(tokenizer, "STOP", skip=False)
    assert text.append(ids, "length") is None
    assert text.text == "aST<eos>OPb"


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stop_string_comes_before_any_other_reason(reason: Reason) -> None:
    tokenizer, ids = told("a", "STOP", "<eos>")
    text = output(tokenizer, "STOP")
    assert text.append(ids, reason) == StopMatch(kept=2, stop="STOP")
    assert text.text == "a"


def test_a_stop_string_completes_with_its_last_byte_token() -> None:
    # though the text is only certain when another token ends the row of bytes
    tokenizer, ids = told_in_bytes("a", b"\n", b"\n", "b")
    text = output(tokenizer, "\n\n")
    assert text.append(ids) == StopMatch(kept=3, stop="\n\n")
    assert text.text == "a"


def test_a_stop_string_may_begin_in_a_row_of_bytes_and_end_after_it() -> None:
    tokenizer, ids = told_in_bytes("a", EMOJI, "b", "c")
    text = output(tokenizer, "😀b")
    assert text.append(ids) == StopMatch(kept=6, stop="😀b")
    assert text.text == "a"


def test_a_stop_string_can_complete_in_what_the_end_releases() -> None:
    tokenizer, ids = told("a", EMOJI[:2])
    text = output(tokenizer, "\ufffd")
    assert text.append(ids) is None
    assert text.append((), "length") == StopMatch(kept=0, stop="\ufffd")
    assert text.text == "a"


# --- min_tokens -----------------------------------------------------------


def test_text_of_the_first_min_tokens_holds_no_stop_string() -> None:
    tokenizer, ids = told("STOP", "x", "STOP", "y")
    text = output(tokenizer, "STOP", min_tokens=2)
    assert text.append(ids) == StopMatch(kept=3, stop="STOP")
    assert text.text == "STOPx"


def test_a_stop_string_does_not_begin_in_the_first_min_tokens() -> None:
    tokenizer, ids = told("x", "ST", "OP", "y")
    text = output(tokenizer, "STOP", min_tokens=2)
    assert text.append(ids, "length") is None
    assert text.text == "xSTOPy"


def test_nothing_is_held_back_before_min_tokens() -> None:
    tokenizer, ids = told("x", "ST", "OP")
    text = output(tokenizer, "STOP", min_tokens=2)
    text.append(ids[:2])
    assert text.text == "xST"


def test_a_character_belongs_to_the_token_that_finishes_it() -> None:
    tokenizer, ids = told("x", EMOJI[:3], EMOJI[3:], "y")
    assert output(tokenizer, "😀", min_tokens=2).append(ids) == StopMatch(3, "😀")
    assert output(tokenizer, "😀", min_tokens=3).append(ids) is None


def test_bytes_of_the_first_min_tokens_stay_free_though_they_are_shown_later() -> None:
    tokenizer, ids = told_in_bytes("x", b"\n", b"\n", b"\n", "y")
    text = output(tokenizer, "\n", min_tokens=3)
    assert text.append(ids[:3]) is None
    assert text.text == "x"
    assert text.append(ids[3:]) == StopMatch(kept=1, stop="\n")
    assert text.text == "x\n\n"


def test_text_after_those_bytes_is_searched_from_its_first_character() -> None:
    tokenizer, ids = told_in_bytes("x", b"\n", "é".encode(), "y", "STOP")
    other = output(tokenizer, "\n", min_tokens=2)
    assert other.append(ids, "length") is None
    assert other.text == "x\néySTOP"
    text = output(tokenizer, "STOP", min_tokens=2)
    assert text.append(ids) == StopMatch(kept=6, stop="STOP")
    assert text.text == "x\néy"


def test_what_the_end_releases_within_min_tokens_is_no_stop_string() -> None:
    tokenizer, ids = told_in_bytes("x", b"\n")
    text = output(tokenizer, "\n", min_tokens=2)
    assert text.append(ids, "length") is None
    assert text.text == "x\n"


# --- stop tokens and ends -------------------------------------------------


@pytest.mark.parametrize("stops", [(), ("never",)], ids=["lazy", "searched"])
def test_the_text_of_the_stop_token_is_left_out_unless_it_is_included(stops: tuple[str]) -> None:
    tokenizer, ids = told("a", "b", "END")
    without = output(tokenizer, *stops)
    assert without.append(ids, "stop") is None
    assert without.text == "ab"
    included = output(tokenizer, *stops, include=True)
    assert included.append(ids, "stop") is None
    assert included.text == "abEND"


def test_a_length_that_is_reached_leaves_no_text_out() -> None:
    tokenizer, ids = told("a", "b", "END")
    text = output(tokenizer)
    text.append(ids, "length")
    assert text.text == "abEND"


@pytest.mark.parametrize("stops", [(), ("never",)], ids=["lazy", "searched"])
def test_an_unfinished_character_is_shown_only_at_the_end(stops: tuple[str]) -> None:
    tokenizer, ids = told("a", EMOJI[:2])
    text = output(tokenizer, *stops)
    text.append(ids)
    assert text.text == "a"
    text.end()
    assert text.text == "a\ufffd"


def test_an_end_comes_once() -> None:
    tokenizer, ids = told("a", "STOP", "ST")
    text = output(tokenizer, "STOP")
    text.append(ids)
    text.end()
    assert text.text == "a"
    with pytest.raises(AssertionError, match="ended"):
        text.append(ids)


def test_an_abort_releases_what_is_held_back() -> None:
    tokenizer, ids = told("a", "ST")
    text = output(tokenizer, "STOP")
    text.append(ids)
    text.end()
    assert text.text == "aST"


# --- reading --------------------------------------------------------------


class Counting:
    """A tokenizer that counts its decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.decodes = 0

    def decode(self, tokens: list[int], **options: Any) -> str:
        self.decodes += 1
        return str(self.tokenizer.decode(tokens, **options))

    def convert_ids_to_tokens(self, token: int) -> Any:
        return self.tokenizer.convert_ids_to_tokens(token)


def test_without_stops_text_is_decoded_once_when_it_is_read_at_the_end() -> None:
    tokenizer, ids = told("a", "b", EMOJI[:2], EMOJI[2:])
    counting = Counting(tokenizer)
    text = output(counting)
    for token in ids:
        text.append([token])
    text.end()
    assert counting.decodes == 0
    assert text.text == "ab😀"
    assert text.take() == "ab😀"
    assert counting.decodes == 1


def test_text_that_was_read_before_goes_on() -> None:
    tokenizer, ids = told("a", EMOJI[:2], EMOJI[2:], "b", EMOJI[:1])
    counting = Counting(tokenizer)
    text = output(counting)
    text.append(ids[:2])
    assert text.text == "a"
    text.append(ids[2:], "length")
    assert text.text == "a😀b\ufffd"
    before = counting.decodes
    assert text.text == "a😀b\ufffd"
    assert counting.decodes == before


@pytest.mark.parametrize("kind", ["no tokenizer", "detokenize off"])
def test_without_a_tokenizer_or_detokenize_there_is_no_text(kind: str) -> None:
    tokenizer, ids = told("a", "b")
    off = kind == "detokenize off"
    text = output(tokenizer if off else None, detokenize=not off)
    assert text.append(ids, "length") is None
    assert text.text == text.take() == ""


def test_stop_strings_without_text_are_refused() -> None:
    with pytest.raises(PromptError, match="there is no tokenizer; use stop_token_ids"):
        output(None, "STOP")
    with pytest.raises(PromptError, match="detokenize is off"):
        output(told("a").tokenizer, "STOP", detokenize=False)


# --- properties -----------------------------------------------------------

PIECES: list[str | bytes] = [
    "a",
    "b",
    "ab",
    "b\n",
    "\n",
    b"\xc3",
    b"\xa9",
    b"\xa9a",
    b"b\xf0\x9f",
    b"\x98\x80",
]
KINDS = [
    told(*PIECES, "<eos>"),
    told_in_bytes("a", "b", "ab", b"\n", "é".encode(), EMOJI, "<eos>", b"\xff"),
]
# by kind: the pieces, by their places, that make whole characters
WORDS = [
    [[0], [1], [2], [3], [4], [5, 6], [5, 7], [8, 9], [10], [5, 10, 6]],
    [[0], [1], [2], [3], [4, 5], [6, 7, 8, 9], [10], [6, 10, 7, 8, 9]],
]

kinds = st.sampled_from(KINDS)
some_stops = st.lists(st.text(alphabet="abé\n😀", min_size=1, max_size=3), max_size=3)
reasons: st.SearchStrategy[Reason] = st.sampled_from(["stop", "length"])


@st.composite
def some_ids(draw: st.DrawFn, kind: Told) -> list[int]:
    return draw(st.lists(st.sampled_from([*kind.ids, 999]), min_size=1, max_size=24))


@st.composite
def split(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    """The ids in blocks; the last is not empty."""
    places = draw(st.lists(st.integers(0, len(ids) - 1), max_size=6))
    bounds = [0, *sorted(places), len(ids)]
    return [ids[i:j] for i, j in itertools.pairwise(bounds)]


class Outcome(NamedTuple):
    """What came of a completion: tokens kept, the stop string if there was one, the text."""

    kept: int
    stop: str | None
    text: str


def run(text: OutputText, blocks: list[list[int]], reason: Reason, *, read: bool) -> Outcome:
    """Feed blocks; the text read in between has to be a beginning of what comes later."""
    kept, so_far, taken, match = 0, "", "", None
    for n, block in enumerate(blocks, 1):
        match = text.append(block, reason if n == len(blocks) else None)
        kept += len(block) if match is None else match.kept
        if read:
            assert text.text.startswith(so_far)
            so_far = text.text
            taken += text.take()
            assert taken == so_far
        if match is not None:
            break
    taken += text.take()
    assert taken == text.text
    return Outcome(kept, match.stop if match else None, taken)


@given(data=st.data(), kind=kinds, stops=some_stops, reason=reasons)
def test_any_split_and_any_reading_gives_the_same(
    data: st.DataObject, kind: Told, stops: list[str], reason: Reason
) -> None:
    ids = data.draw(some_ids(kind))
    include, skip, read = (data.draw(st.booleans()) for _ in range(3))
    min_tokens = data.draw(st.integers(0, 4))
    blocks = data.draw(split(ids))

    def fresh() -> OutputText:
        return output(kind.tokenizer, *stops, include=include, skip=skip, min_tokens=min_tokens)

    one = run(fresh(), [ids], reason, read=False)
    assert run(fresh(), blocks, reason, read=read) == one
    assert run(fresh(), [[i] for i in ids], reason, read=True) == one


@given(data=st.data(), kind=kinds, reason=reasons, include=st.booleans(), skip=st.booleans())
def test_without_a_stop_string_the_text_is_that_of_one_decode(
    data: st.DataObject, kind: Told, reason: Reason, include: bool, skip: bool
) -> None:
    ids = data.draw(some_ids(kind))
    shown = ids[:-1] if reason == "stop" and not include else ids
    expected = kind.tokenizer.decode(shown, skip_special_tokens=skip)
    for stops in ([], ["never"]):
        text = output(kind.tokenizer, *stops, include=include, skip=skip)
        assert run(text, [[i] for i in ids], reason, read=True).text == expected


def whole(kind: Told, ids: list[int]) -> str:
    """The characters that are finished, for ids of a valid text: the most that a prefix shows."""
    prefixes = [
        kind.tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids) + 1)
    ]
    return max((str(p).rstrip("\ufffd") for p in prefixes), key=len)


def by_definition(
    kind: Told, ids: list[int], stops: list[str], *, include: bool, min_tokens: int
) -> Outcome:
    """Look at the text after each token for the stop string that ends first, then longest."""
    free = len(whole(kind, ids[:min_tokens]))
    for kept in range(min_tokens + 1, len(ids) + 1):
        text = whole(kind, ids[:kept])
        found = [(text.find(s, free) + len(s), -len(s), s) for s in stops if s in text[free:]]
        if found:
            end, minus_length, stop = min(found)
            return Outcome(kept, stop, text[: end if include else end + minus_length])
    return Outcome(len(ids), None, whole(kind, ids))


@given(data=st.data(), which=st.integers(0, 1), stops=some_stops, include=st.booleans())
def test_the_cut_is_where_the_definition_says(
    data: st.DataObject, which: int, stops: list[str], include: bool
) -> None:
    kind = KINDS[which]
    words = data.draw(st.lists(st.sampled_from(WORDS[which]), min_size=1, max_size=16))
    ids = [kind.ids[i] for word in words for i in word]
    min_tokens = data.draw(st.integers(0, min(4, len(ids))))
    expected = by_definition(kind, ids, stops, include=include, min_tokens=min_tokens)
    text = output(kind.tokenizer, *stops, include=include, min_tokens=min_tokens)
    assert run(text, data.draw(split(ids)), "length", read=True) == expected
