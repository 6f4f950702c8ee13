"""What may run together, decided from capabilities."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from specdec.config import SpeculativeConfig
from specdec.errors import ConfigError, PluginError
from specdec.legality import settle
from specdec.types import Capabilities, KVLayer, VerificationRule

DRAWN = {"greedy": "deterministic", "probabilistic": "independent", "coupled": "coupled"}
RULES = ("coupled", "standard", "block", "synthetic")


def config(**values: Any) -> SpeculativeConfig:
    synthetic = values.get("rejection_sample_method") == "synthetic"
    if synthetic and "synthetic_acceptance_rates" not in values:
        values["synthetic_acceptance_length"] = 1.5
    parsed = SpeculativeConfig.parse({"method": "some", **values})
    assert parsed is not None
    return parsed


def capabilities(**values: Any) -> Capabilities:
    return Capabilities(**values)


@pytest.mark.parametrize(
    ("drawn", "rule", "asked"), list(itertools.product(DRAWN.values(), RULES, [None, *DRAWN]))
)
def test_every_way_of_drawing_under_every_rule(drawn: str, rule: str, asked: str | None) -> None:
    values = {"rejection_sample_method": rule}
    if asked is not None:
        values["draft_sample_method"] = asked
    has = capabilities(drawn=drawn, q="dense" if drawn == "independent" else None)
    if asked == "coupled" and rule != "coupled":
        with pytest.raises(ConfigError, match="'coupled' is refused with"):
            config(**values)
    elif drawn == "coupled" and rule != "coupled":
        with pytest.raises(
            ConfigError,
            match=f"X draws its drafts with the target's own noise.*'{rule}' takes drafts to be"
            ".*; use 'coupled', or draft_sample_method='probabilistic'",
        ):
            settle(config(**values), has, "X")
    elif asked is not None and DRAWN[asked] != drawn:
        way = {v: k for k, v in DRAWN.items()}[drawn]
        with pytest.raises(
            ConfigError,
            match=f"'{asked}' is refused: X draws its drafts {drawn}; "
            f"leave the key out or write '{way}'",
        ):
            settle(config(**values), has, "X")
    else:
        agreement = settle(config(**values), has, "X")
        assert agreement.rule.name == rule
        assert agreement.rule.lossless == (rule != "synthetic")


@pytest.mark.parametrize(
    ("asked", "has", "expected"),
    [
        (None, {}, 5),
        (None, {"max_drafts": 3}, 3),
        (None, {"max_drafts": 9}, 5),
        (None, {"default_drafts": 7}, 7),
        (None, {"max_drafts": 8, "default_drafts": 8}, 8),
        (4, {"max_drafts": 4, "default_drafts": 2}, 4),
        (100, {}, 100),
    ],
)
def test_the_number_of_drafts_is_the_users_or_else_the_speculators(
    asked: int | None, has: dict[str, int], expected: int
) -> None:
    assert settle(config(num_speculative_tokens=asked), capabilities(**has), "X").drafts == expected


def test_synthetic_rates_tell_the_number_of_drafts() -> None:
    rates = [0.9, 0.5, 0.1]
    asked = config(rejection_sample_method="synthetic", synthetic_acceptance_rates=rates)
    assert settle(asked, capabilities(), "X").drafts == 3


def test_more_drafts_than_the_speculator_can_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="num_speculative_tokens is 4, but X drafts between 1 and 3 tokens a step"
    ):
        settle(config(num_speculative_tokens=4), capabilities(max_drafts=3), "X")


OWN = VerificationRule("typical", lossless=False, needs_q=True)


def test_a_rule_of_the_speculators_own_runs_if_it_is_named() -> None:
    has = capabilities(drawn="independent", q="sparse", verification=[OWN])
    assert settle(config(rejection_sample_method="typical"), has, "X").rule is OWN
    assert settle(config(), has, "X").rule.name == "coupled"


def test_a_rule_that_reads_q_needs_a_drafter_that_has_one() -> None:
    named = config(rejection_sample_method="typical")
    with pytest.raises(ConfigError, match="'typical' needs draft probabilities, which X has not"):
        settle(named, capabilities(drawn="independent", verification=[OWN]), "X")
    certain = capabilities(drawn="deterministic", verification=[OWN])
    assert settle(named, certain, "X").rule is OWN  # all of its q is on the draft


def test_a_rule_of_its_own_may_accept_coupled_drafts() -> None:
    rule = VerificationRule("close", lossless=True, accepts_coupled=True)
    has = capabilities(drawn="coupled", verification=[rule])
    assert settle(config(rejection_sample_method="close"), has, "X").rule is rule
    strict = VerificationRule("strict", lossless=True)
    has = capabilities(drawn="coupled", verification=[strict])
    with pytest.raises(
        ConfigError, match="rejection_sample_method='strict' takes drafts to be independent"
    ):
        settle(config(rejection_sample_method="strict"), has, "X")


def test_an_unknown_rule_is_named_with_its_neighbours() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'standart' is neither core's nor of X; did you mean 'standard'.*"
        "known: block, coupled, standard, synthetic, typical",
    ):
        settle(config(rejection_sample_method="standart"), capabilities(verification=[OWN]), "X")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drawn": "random"}, "drawn is 'random', but it has to be 'deterministic' or 'coupled'"),
        ({"q": "full"}, "q is 'full', but it has to be 'dense' or 'sparse' or null"),
        ({"max_drafts": 2.5}, "max_drafts is 2.5, but it has to be an integer or null"),
        ({"max_drafts": 0}, "max_drafts is 0, but it has to be at least 1 or None"),
        ({"default_drafts": -1}, "default_drafts is -1"),
        ({"max_context": 0}, "max_context is 0"),
        ({"max_drafts": 2, "default_drafts": 3}, "default_drafts is 3, more than max_drafts, 2"),
        ({"lookahead_slots": -1}, "lookahead_slots is -1"),
        ({"lookahead_slots": 10**9}, "lookahead_slots is 1000000000; at most 4096"),
        ({"host_tokens": "yes"}, "host_tokens is 'yes', but it has to be true or false"),
        ({"hidden_states": ["2"]}, "hidden_states holds '2', but it has to hold ints"),
        ({"kv_layers": [(2, 8, 8)]}, r"kv_layers holds \(2, 8, 8\), but it has to hold KVLayers"),
        ({"verification": ["typical"]}, "verification holds 'typical'.*VerificationRules"),
        ({"verification": [OWN, OWN]}, "declares the rule 'typical' twice"),
        (
            {"verification": [VerificationRule("block", lossless=True)]},
            "declares the rule 'block', which is core's own name",
        ),
    ],
)
def test_capabilities_that_make_no_sense_are_the_plugins_fault(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(PluginError, match=f"X.*{message}"):
        settle(config(), capabilities(**values), "X")


def test_capabilities_of_the_right_types_pass() -> None:
    has = capabilities(
        drawn="independent",
        q="dense",
        max_drafts=7,
        hidden_states=[2, 4],
        kv_layers=[KVLayer(2, 8, 8)],
        lookahead_slots=1,
        max_context=100,
    )
    assert has.hidden_states == (2, 4)
    assert settle(config(num_speculative_tokens=7), has, "X").drafts == 7


@pytest.mark.parametrize("drawn", ["deterministic", "coupled"])
def test_only_independent_drafts_have_a_law_to_hand_over(drawn: Any) -> None:
    # judged by p / q, an argmax with the softmax it was taken from biases the output
    with pytest.raises(PluginError, match=f"drawn '{drawn}' have no law of their own"):
        settle(config(), capabilities(drawn=drawn, q="dense"), "X")


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ({"heads": 0}, "heads of a KVLayer is 0, but it has to be an integer from 1 up"),
        ({"heads": True}, "heads of a KVLayer is True"),
        ({"k_dim": "4"}, "k_dim of a KVLayer is '4'"),
        ({"window": -3}, "window of a KVLayer is -3"),
        ({"dtype": "bf16"}, "dtype of a KVLayer is 'bf16', but it has to be a torch.dtype or None"),
    ],
)
def test_a_layer_of_pages_has_to_make_sense(layer: dict[str, Any], said: str) -> None:
    values: Any = {"heads": 1, "k_dim": 2, "v_dim": 2, **layer}
    with pytest.raises(PluginError, match=f"^X: capabilities: {said}"):
        settle(config(), capabilities(kv_layers=[KVLayer(**values)]), "X")
