"""What is compared."""

from __future__ import annotations

import pytest

from specdec import ConfigError, PluginError
from specdec.bench.configurations import check_methods, configurations


def test_the_baseline_comes_first_and_names_are_what_was_given() -> None:
    found = configurations(["some", "some:num_speculative_tokens=3"], baseline=True)
    assert [c.name for c in found] == ["plain", "some", "some:num_speculative_tokens=3"]
    assert found[0].config is None
    assert [c.name for c in configurations(["some"], baseline=False)] == ["some"]


def test_long_ones_are_named_by_their_method_and_place() -> None:
    long = '{"method": "some", "num_speculative_tokens": 3, "length_policy": "falling"}'
    _, short, named = configurations(["other", long], baseline=True)
    assert (short.name, named.name, named.text) == ("other", "some (2)", long)


@pytest.mark.parametrize(
    ("texts", "baseline", "said"),
    [
        (["some", "some"], True, "the configuration 'some' is given twice"),
        ([], False, "leaves nothing to measure"),
        (["some:num_speculative_tokens=0"], True, "num_speculative_tokens is 0"),
        ([""], True, "is empty"),
        (["plain"], True, "always measured as the baseline; leave -sc plain out"),
        (["some", "Plain "], False, "leave -sc plain and --no-baseline out"),
    ],
)
def test_mistakes_are_told(texts: list[str], baseline: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configurations(texts, baseline=baseline)


def test_a_method_that_is_not_installed_is_told() -> None:
    check_methods(configurations(["model=org/drafter"], baseline=True))
    with pytest.raises(PluginError, match="no speculator named 'nosuch'"):
        check_methods(configurations(["nosuch"], baseline=True))
