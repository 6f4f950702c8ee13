"""What a user may write for `speculative_config`, and what is said when it is wrong."""

from __future__ import annotations

import contextlib
import json
import re
import string
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import config_text
from specdec._structure import fits, shown
from specdec.acceptance import conditional, rates_for_length
from specdec.config import SpeculativeConfig, SpeculatorConfig
from specdec.errors import ConfigError, PluginError
from specdec.length_table import drafts_by_batch
from specdec.speculator import NoOptions, Speculator

calm = settings(deadline=None)  # others use the machine as well


def parse(value: Any) -> SpeculativeConfig:
    config = SpeculativeConfig.parse(value)
    assert config is not None
    return config


@attrs.frozen
class LookupOptions:
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None


class Lookup(Speculator):
    Options = LookupOptions
    reads_model = True


class Bare(Speculator):
    """No options of its own."""


# --- the forms ------------------------------------------------------------

VLLM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 5,
    "prompt_lookup_min": 2,
}


@pytest.mark.parametrize(
    "form",
    [
        VLLM,
        json.dumps(VLLM),
        "ngram:num_speculative_tokens=3,prompt_lookup_max=5,prompt_lookup_min=2",
        " ngram : num-speculative-tokens = 3 , prompt_lookup_max=5,prompt-lookup-min=2 ",
        "method=ngram,num_speculative_tokens=3,prompt_lookup_max=5,prompt_lookup_min=2",
        {k.replace("_", "-"): v for k, v in VLLM.items()},
    ],
    ids=["dict", "json", "short", "spaced", "options only", "hyphens"],
)
def test_every_form_gives_the_same_configuration(form: Any) -> None:
    config = parse(form)
    assert (config.method, config.num_speculative_tokens) == ("ngram", 3)
    assert config.resolve(Lookup, "ngram").options == LookupOptions(5, 2)


@pytest.mark.parametrize(
    "pasted",
    [
        "ngram",
        VLLM,
        {"method": "eagle", "model": "x", "num_speculative_tokens": 3},
        {"method": "draft_model", "model": "x", "enforce_eager": True, "max_model_len": 16384},
        {"method": "mtp", "num_speculative_tokens": 2},
        {"model": "org/drafter", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1},
        {"method": "ngram_gpu", "num_speculative_tokens": 4, "disable_padded_drafter_batch": False},
        {
            "method": "eagle3",
            "model": "x",
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 2.5,
            "num_speculative_tokens": 4,
        },
    ],
)
def test_configurations_of_vllm_can_be_pasted(pasted: Any) -> None:
    config = parse(pasted)
    config.resolve(Lookup, "some method")
    if isinstance(pasted, dict):
        shared = {k: v for k, v in pasted.items() if k in attrs.fields_dict(SpeculativeConfig)}
        assert {k: getattr(config, k) for k in shared} == shared


def test_nothing_is_plain_decoding_and_a_configuration_passes_unchanged() -> None:
    assert SpeculativeConfig.parse(None) is None
    config = parse("ngram")
    assert SpeculativeConfig.parse(config) is config


def test_a_path_is_read_as_text() -> None:
    assert parse({"model": Path("a") / "b"}).model == "a/b"


def test_a_class_stands_for_its_method() -> None:
    assert parse({"method": Bare}).method is Bare
    with pytest.raises(ConfigError, match=r"method is .*, but it has to be text or a sub"):
        parse({"method": int})


def test_what_is_left_unsaid_has_its_documented_default() -> None:
    given_to_load = parse("ngram").resolve(Bare, "ngram")
    assert given_to_load == SpeculatorConfig(
        method="ngram",
        model=None,
        revision=None,
        code_revision=None,
        num_speculative_tokens=None,
        rejection_sample_method="coupled",
        draft_sample_method="coupled",
        max_model_len=None,
        enforce_eager=False,
        options=NoOptions(),
    )


@pytest.mark.parametrize(
    ("rule", "drawn"),
    [("coupled", "coupled"), ("standard", "probabilistic"), ("own", "probabilistic")],
)
def test_drafts_are_drawn_as_the_rule_needs_it(rule: str, drawn: str) -> None:
    config = parse({"method": "x", "rejection_sample_method": rule})
    assert config.resolve(Bare, "x").draft_sample_method == drawn


# --- the short string -----------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=-2", -2),
        ("a=1.5", 1.5),
        ("a=1e3", 1000.0),
        ("a=.5", 0.5),
        ("a=true", True),
        ("a=False", False),
        ("a=null", None),
        ("a=none", None),
        ("a=path/or/hub-id", "path/or/hub-id"),
        ("a=1.5.2", "1.5.2"),
        ("a='1'", "1"),
        ("a=''", ""),
        ("a='x,y=z:w|v'", "x,y=z:w|v"),
        ('a="say \\"hi\\" it\'s"', 'say "hi" it\'s'),
        ("a=[1, 2, [3]]", [1, 2, [3]]),
        ('a={"b": "c,d"}', {"b": "c,d"}),
        ("a=two words", "two words"),
    ],
)
def test_a_value_is_what_it_looks_like(text: str, value: Any) -> None:
    found = config_text.parse(text)["a"]
    assert (found, type(found)) == (value, type(value))


word = st.text(string.ascii_letters + string.digits + "_./", min_size=1, max_size=12)
key = st.from_regex(r"[a-z][a-z0-9_]{0,14}", fullmatch=True)
simple = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
nested = st.recursive(
    simple,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def written(options: dict[str, Any]) -> str:
    return ",".join(f"{k}={json.dumps(v)}" for k, v in options.items())


@calm
@given(word, st.dictionaries(key.filter(lambda k: k != "method"), nested))
def test_anything_json_can_say_is_written_as_a_short_string_and_read_back(
    method: str, options: dict[str, Any]
) -> None:
    text = f"{method}:{written(options)}" if options else method
    assert config_text.parse(text) == {"method": method, **options}
    if options:
        assert config_text.parse(written(options)) == options
    assert config_text.parse(json.dumps({"method": method, **options})) == {
        "method": method,
        **options,
    }


@calm
@given(st.dictionaries(key, st.text(st.characters(exclude_characters="'"))))
def test_single_quotes_keep_every_character(options: dict[str, str]) -> None:
    text = ",".join(f"{k}='{v}'" for k, v in options.items())
    if options:
        assert config_text.parse(text) == options


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("ngram:", "a key is missing at character 7"),
        ("=3", "a key is missing at character 1"),
        ("ngram:a", "'=' is expected after 'a', but nothing stands at character 8"),
        ("ngram:a=", "a value is missing at character 9"),
        ("ngram,a=1", "':' is expected, but ',' stands at character 6"),
        ("ngram:a=1:b=2", "',' is expected after a value, but ':' stands at character 10"),
        ("ngram:a=1,,b=2", "a key is missing at character 11"),
        ("ngram:a=1,a=2", "the key 'a' stands twice, the second time at character 12"),
        ("ngram:a-b=1,a_b=2", "the key 'a_b' stands twice"),
        ("ngram:method=eagle", "the key 'method' stands twice"),
        ("ngram:a='x", "the quote is never closed at character 9"),
        ("ngram:a=[1,", "a JSON value is broken .* at character 9"),
        ('ngram:a={"b":1,"b":2}', "the key 'b' stands twice"),
        ("ngram|eagle", "'|' is reserved for chains of speculators, .* at character 6"),
        ("ngram:a=1|eagle", "'|' is reserved for chains of speculators, .* at character 10"),
        ("|", "a method or a key is missing at character 1"),
        ('{"a": 1', "is not valid JSON"),
        ('{"a": 1} x', "is not valid JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ('{"a": NaN}', "NaN is no number"),
    ],
)
def test_text_that_breaks_the_grammar_is_refused_and_shows_where(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("'|'", r"'\|'")):
        SpeculativeConfig.parse(text)


# --- wrong keys and values ------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "neither a method nor a model"),
        ({"num_speculative_tokens": 3}, "neither a method nor a model"),
        ({"method": 3}, "method is 3, but it has to be text"),
        ({"method": " "}, "method is empty"),
        ({"model": ""}, "model is empty"),
        ({"method": "x", "rejection_sample_method": ""}, "rejection_sample_method is empty"),
        (
            {"method": "x", "num_speculative_tokens": "3"},
            "'3', but it has to be an integer or null",
        ),
        ({"method": "x", "num_speculative_tokens": True}, "True, but it has to be an integer"),
        ({"method": "x", "num_speculative_tokens": 2.0}, "2.0, but it has to be an integer"),
        ({"method": "x", "num_speculative_tokens": 0}, "is 0, but it has to be at least 1"),
        ({"method": "x", "max_model_len": -1}, "is -1, but it has to be at least 1"),
        ({"method": "x", "enforce_eager": 1}, "1, but it has to be true or false or null"),
        ({"method": "x", "length_policy": "adaptive"}, "has to be 'fixed' or 'falling'"),
        ({"method": "x", "draft_sample_method": "argmax"}, "has to be 'greedy' or 'probabilistic'"),
        ({"method": "x", "rejection_sample_method": "fly"}, "refused: it is lossy"),
        ({"method": "x", "rejection_sample_method": None}, "None, but it has to be text"),
        ({"method": "x", "synthetic_acceptance_rates": [1]}, "needs rejection_sample_method"),
        ({"method": "x", "synthetic_acceptance_length": 2}, "needs rejection_sample_method"),
        ({"method": "x", 3: 4}, "the key 3 of speculative_config is no text"),
        ({"method": "x", "max-model-len": 3, "max_model_len": 4}, "stands twice"),
        (3, "not int"),
        (["ngram"], "not list"),
        ("x:revision=1234567", "in a short string, put it in quotes"),
    ],
)
def test_a_wrong_value_is_refused_and_says_what_would_do(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        SpeculativeConfig.parse(given)


def test_the_constructor_checks_as_much_as_parse() -> None:
    with pytest.raises(ConfigError, match="it has to be an integer or null"):
        SpeculativeConfig(method="x", num_speculative_tokens="3")  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["standard", "block", "synthetic"])
def test_coupled_drafts_are_refused_with_rules_they_would_bias(rule: str) -> None:
    extra = {"synthetic_acceptance_length": 2.0} if rule == "synthetic" else {}
    with pytest.raises(ConfigError, match=f"is refused with rejection_sample_method={rule!r}"):
        parse(
            {"method": "x", "rejection_sample_method": rule, "draft_sample_method": "coupled"}
            | extra
        )


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("prompt_lookup_maxx", "prompt_lookup_max"),
        ("num_speculative_token", "num_speculative_tokens"),
        ("rejection_sampling_method", "rejection_sample_method"),
        ("num_spec", "num_speculative_tokens"),
        ("synthetic", "synthetic_acceptance_rates"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(key: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"method": "ngram", key: 3}).resolve(Lookup, "ngram")
    said = str(caught.value)
    assert f"'ngram' has no key {key!r}; did you mean {near!r}?" in said
    assert "its own: prompt_lookup_max, prompt_lookup_min" in said
    assert "num_speculative_tokens" in said


def test_extra_is_no_key() -> None:
    with pytest.raises(ConfigError, match="has no key 'extra'"):
        parse({"method": "x", "extra": {"a": 1}}).resolve(Bare, "x")


# --- options of a speculator ----------------------------------------------


def _even(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value % 2:
        raise ValueError("depth has to be even", attribute, value)


@attrs.frozen
class TreeOptions:
    depth: int = attrs.field(validator=_even)
    weights: tuple[float, ...] = ()
    pair: tuple[int, int] = (1, 1)
    by_name: dict[str, int] = attrs.field(factory=dict)
    folder: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))


class Tree(Speculator):
    Options = TreeOptions


def tree(**options: Any) -> TreeOptions:
    found = parse({"method": "tree", **options}).resolve(Tree, "tree").options
    assert isinstance(found, TreeOptions)
    return found


def test_options_are_typed_and_converted() -> None:
    found = tree(depth=2, weights=[1, 0.5], pair=[2, 3], by_name={"a": 1}, folder="x")
    same: Any = {"weights": [1, 0.5], "pair": [2, 3], "by_name": {"a": 1}}
    assert found == TreeOptions(2, folder=Path("x"), **same)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "the options of 'tree' need the key 'depth'"),
        ({"depth": "2"}, "depth is '2', but it has to be an integer"),
        ({"depth": 3}, "the options of 'tree': depth has to be even"),
        ({"depth": 2, "weights": ["a"]}, "weights is ['a'], but it has to be a list (each entry a"),
        ({"depth": 2, "pair": [1]}, "pair is [1], but it has to be a list of an integer, an"),
        ({"depth": 2, "by_name": {"a": "b"}}, "by_name is {'a': 'b'}, but it has to be an object"),
        ({"depth": 2, "folder": 3}, "the options of 'tree': "),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tree(**options)
    assert str(caught.value).startswith(said) or said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_that_hide_behind_a_shared_key_are_the_plugins_fault() -> None:
    @attrs.frozen
    class Options:
        model: str = "x"

    class Taken(Speculator):
        pass

    Taken.Options = Options
    with pytest.raises(PluginError, match="have the key 'model', which every method shares"):
        parse("x").resolve(Taken, "x")


def test_options_have_to_be_an_attrs_class() -> None:
    class Wrong(Speculator):
        Options = dict

    with pytest.raises(PluginError, match=r"Wrong\.Options is <class 'dict'>; it has to be"):
        parse("x").resolve(Wrong, "x")


# --- synthetic acceptance -------------------------------------------------


def synthetic(**keys: Any) -> SpeculativeConfig:
    return parse({"method": "x", "rejection_sample_method": "synthetic", **keys})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "exactly one of"),
        (
            {"synthetic_acceptance_rates": [1.0], "synthetic_acceptance_length": 2},
            "exactly one of .* not both",
        ),
        ({"synthetic_acceptance_rates": []}, r"numbers in \[0, 1\]"),
        ({"synthetic_acceptance_rates": [1.5]}, r"numbers in \[0, 1\]"),
        ({"synthetic_acceptance_rates": [float("nan")]}, r"numbers in \[0, 1\]"),
        ({"synthetic_acceptance_rates": [0.5, 0.6]}, "which cannot rise"),
        ({"synthetic_acceptance_rates": ["a"]}, "has to be a list"),
        (
            {"synthetic_acceptance_rates": [0.5], "num_speculative_tokens": 2},
            "has 1 entries for 2 drafts",
        ),
        ({"synthetic_acceptance_length": 0.5}, "at least 1 token"),
        ({"synthetic_acceptance_length": float("nan")}, "at least 1 token"),
        ({"synthetic_acceptance_length": float("inf")}, "at least 1 token"),
        ({"synthetic_acceptance_length": 4.5, "num_speculative_tokens": 3}, "between 1 and 4"),
    ],
)
def test_forced_acceptance_that_cannot_be_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        synthetic(**keys)


@calm
@given(st.integers(1, 16), st.floats(0, 1))
def test_rates_for_a_length_have_that_mean_and_never_rise(drafts: int, share: float) -> None:
    length = 1 + share * drafts
    rates = rates_for_length(length, drafts)
    assert len(rates) == drafts
    assert 1 + sum(rates) == pytest.approx(length)
    assert rates == sorted(rates, reverse=True)
    assert all(r in (0, 1) for r in rates) or sum(0 < r < 1 for r in rates) == 1


def test_conditional_rates_multiply_back_to_the_rates() -> None:
    assert conditional([0.8, 0.4, 0.0, 0.0]) == [0.8, 0.5, 0.0, 0.0]


# --- drafts by batch size -------------------------------------------------


@pytest.mark.parametrize(
    ("ranges", "drafts", "most", "table"),
    [
        ([(1, 16, 3), (32, 128, 2)], 4, 256, [3] * 32 + [2] * 225),
        ([(1, 4, 9)], 4, 6, [4] * 7),
        ([[1, 1, 5], [2, 2, 0], [3, 9, 1]], 5, 4, [5, 5, 0, 1, 1]),
        ([[3, 9, 1], [1, 2, 5]], 5, 4, [5, 5, 5, 1, 1]),
        ([[1, 10**30, 2]], 5, 2, [2, 2, 2]),
        ([[1, 2, 3], [50, 60, 1]], 5, 4, [3] * 5),
    ],
    ids=["gap and tail", "cut to the most", "zero", "any order", "huge", "beyond the batch"],
)
def test_drafts_by_batch(ranges: Any, drafts: int, most: int, table: list[int]) -> None:
    assert drafts_by_batch(ranges, drafts, most) == table


@calm
@given(st.data(), st.integers(1, 8), st.integers(1, 40))
def test_every_batch_size_has_the_drafts_of_the_last_range_that_began(
    data: st.DataObject, drafts: int, most: int
) -> None:
    starts = sorted(data.draw(st.sets(st.integers(2, 50), max_size=5)) | {1})
    ends = [*(s - 1 for s in starts[1:]), 60]
    ranges = [
        (a, data.draw(st.integers(a, b)), data.draw(st.integers(0, 10)))
        for a, b in zip(starts, ends, strict=True)
    ]
    table = drafts_by_batch(data.draw(st.permutations(ranges)), drafts, most)
    for running in range(1, most + 1):
        began = max(r for r in ranges if r[0] <= running)
        assert table[running] == min(drafts, began[2])
    assert len(table) == most + 1


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ([], "is empty"),
        ("1-16:3", "has to be a list"),
        ({"1": 2}, "has to be a list"),
        ([3], "holds 3; every entry has to be three integers"),
        ([[1, 2]], "every entry has to be three integers"),
        ([[1, 2, 3, 4]], "every entry has to be three integers"),
        ([[1, 2, "3"]], "every entry has to be three integers"),
        ([[1, 2, True]], "every entry has to be three integers"),
        ([[1, 2.0, 3]], "every entry has to be three integers"),
        ([[0, 2, 3]], "a range goes from 1 or more requests"),
        ([[1, 0, 3]], "a range goes from 1 or more requests to no fewer"),
        ([[1, 2, -1]], "drafts cannot be negative"),
        ([[2, 3, 1]], "starts at 2 requests; the first range has to start at 1"),
        ([[1, 4, 2], [4, 8, 1]], r"the ranges \[1, 4, 2\] and \[4, 8, 1\] overlap"),
        ([[5, 8, 1], [1, 5, 2]], r"the ranges \[1, 5, 2\] and \[5, 8, 1\] overlap"),
    ],
)
def test_a_table_of_drafts_that_makes_no_sense_is_refused(ranges: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse({"method": "x", "num_speculative_tokens_per_batch_size": ranges})


# --- hostile input --------------------------------------------------------


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def deep(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
HOSTILE: list[Any] = [
    '{"method": ' + "[" * 100_000,
    "x:a=" + '{"a":' * 100_000,
    "x:num_speculative_tokens=" + "9" * 5000,
    '{"num_speculative_tokens": ' + "9" * 5000 + "}",
    "x:num_speculative_tokens=-" + "9" * 4000,
    "x:" + ",".join(f"a{i}=1" for i in range(20_000)),
    "x" * 1_000_000 + "=",
    "'" * 1001,
    '"' * 1001,
    "x:num_speculative_tokens=\u0663",
    {"method": "x", "num_speculative_tokens": deep(100_000)},
    {"method": "x", "num_speculative_tokens_per_batch_size": deep(100_000)},
    {"method": "x", "num_speculative_tokens_per_batch_size": CYCLE},
    {"method": "x", "num_speculative_tokens": -(10**5000)},
    {"method": "x", "synthetic_acceptance_rates": [10**5000]},
    {"method": "x", "num_speculative_tokens": Unprintable()},
    {"method": "x", Unprintable(): 1},
    {"method": "x", "unknown": deep(100_000)},
    {"method": "x", "quantization": deep(100_000)},
    {"method": "x", "prompt_lookup_max": deep(100_000)},
    {"method": "x", "a" * 1_000_000: 1},
    b"ngram",
    object(),
]


@pytest.mark.parametrize("value", HOSTILE, ids=[str(i) for i in range(len(HOSTILE))])
def test_hostile_input_is_refused_shortly(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(value).resolve(Lookup, "lookup")
    assert len(str(caught.value)) < 3000


grammar = st.text(st.sampled_from("ab1:=,|'\"[]{}. -eE\\n\u0663\ud800"), max_size=40)


@calm
@given(grammar | st.text() | grammar.map("ngram:".__add__) | grammar.map("{".__add__))
def test_no_text_raises_anything_but_a_configuration_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse(text).resolve(Lookup, "lookup")


anything = st.recursive(
    simple | st.floats() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
)
names = st.sampled_from([a.name for a in attrs.fields(SpeculativeConfig)] + ["quantization", "x"])


@calm
@given(st.dictionaries(names | st.text(), anything, max_size=5) | anything)
def test_no_value_raises_anything_but_a_configuration_error(value: Any) -> None:
    with contextlib.suppress(ConfigError):
        config = SpeculativeConfig.parse(value)
        if config is not None:
            config.resolve(Lookup, "lookup")


@calm
@given(anything)
def test_a_value_is_shown_without_failing_and_shortly(value: Any) -> None:
    assert len(shown(value)) < 60_000
    assert isinstance(fits(value, dict[str, list[int]] | tuple[int, str]), bool)


@pytest.mark.parametrize("key", ["model", "revision", "code_revision"])
def test_keys_of_a_checkpoint_are_refused_by_a_method_that_loads_none(key: str) -> None:
    config = parse({"method": "bare", key: "some/drafter"})
    with pytest.raises(ConfigError, match=f"{key}='some/drafter' is refused: 'bare' loads no"):
        config.resolve(Bare, "bare")
    config.resolve(Lookup, "bare")


def test_a_model_that_is_only_the_methods_name_asks_for_no_checkpoint() -> None:
    assert parse({"method": "bare", "model": "bare"}).resolve(Bare, "bare").model == "bare"


def test_a_misspelt_method_key_is_guessed() -> None:
    with pytest.raises(ConfigError, match="neither a method nor a model; did you mean 'method'"):
        SpeculativeConfig.parse({"metod": "ngram"})
