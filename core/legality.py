"""Which speculator may run under which verification: decided from capabilities alone."""

from __future__ import annotations

import attrs
import torch

from specdec._structure import check_keys
from specdec.config import CORE_RULES, DEFAULT_DRAFTS, SpeculativeConfig
from specdec.errors import ConfigError, PluginError, listed, nearest
from specdec.types import Capabilities, KVLayer, VerificationRule

MOST_LOOKAHEAD = 4096
_DRAWN = {"greedy": "deterministic", "probabilistic": "independent", "coupled": "coupled"}
_CORE = {
    "coupled": VerificationRule("coupled", lossless=True, accepts_coupled=True),
    "standard": VerificationRule("standard", lossless=True),
    "block": VerificationRule("block", lossless=True),
    "synthetic": VerificationRule("synthetic", lossless=False),
}


@attrs.frozen
class Agreement:
    """What core and the speculator settled on.

    rule: the verification in force. drafts: K, the columns of every draft.
    """

    rule: VerificationRule
    drafts: int


def settle(config: SpeculativeConfig, capabilities: Capabilities, label: str) -> Agreement:
    """Check the capabilities against the configuration and fix rule and number of drafts.

    Raises:
        ConfigError: the two do not fit, with the reason and what would.
        PluginError: the capabilities contradict themselves.
    """
    _check(capabilities, label)
    rules = {**_CORE, **{r.name: r for r in capabilities.verification}}
    name = config.rejection_sample_method
    if name not in rules:
        raise ConfigError(
            f"rejection_sample_method={name!r} is neither core's nor of {label}"
            f"{nearest(name, rules)} (known: {listed(rules)})"
        )
    rule = rules[name]
    if capabilities.drawn == "coupled" and not rule.accepts_coupled:
        raise ConfigError(
            f"{label} draws its drafts with the target's own noise (coupled), of which "
            f"rejection_sample_method={name!r} takes drafts to be independent; use 'coupled', or "
            "draft_sample_method='probabilistic'"
        )
    asked = config.draft_sample_method
    if asked is not None and _DRAWN[asked] != capabilities.drawn:
        way = next(k for k, v in _DRAWN.items() if v == capabilities.drawn)
        raise ConfigError(
            f"draft_sample_method={asked!r} is refused: {label} draws its drafts "
            f"{capabilities.drawn}; leave the key out or write {way!r}"
        )
    if rule.needs_q and capabilities.drawn == "independent" and capabilities.q is None:
        raise ConfigError(f"the rule {name!r} needs draft probabilities, which {label} has not")
    most = capabilities.max_drafts
    drafts = config.num_speculative_tokens
    if drafts is None and config.synthetic_acceptance_rates is not None:
        drafts = len(config.synthetic_acceptance_rates)
    if drafts is None:
        drafts = capabilities.default_drafts or min(DEFAULT_DRAFTS, most or DEFAULT_DRAFTS)
    if drafts < 1 or (most is not None and drafts > most):
        raise ConfigError(
            f"num_speculative_tokens is {drafts}, but {label} drafts between 1 and "
            f"{most or 'any number of'} tokens a step"
        )
    return Agreement(rule=rule, drafts=drafts)


def _check(capabilities: Capabilities, label: str) -> None:
    """Refuse capabilities of wrong types, and those that contradict themselves."""
    try:
        check_keys(Capabilities, attrs.asdict(capabilities, recurse=False), "capabilities")
    except ConfigError as error:
        raise PluginError(f"{label}: {error}") from error
    for name, kind in (("hidden_states", int), ("kv_layers", KVLayer)):
        for entry in getattr(capabilities, name):
            if not isinstance(entry, kind):
                raise PluginError(
                    f"{label}: capabilities: {name} holds {entry!r}, "
                    f"but it has to hold {kind.__name__}s"
                )
    for name in ("max_drafts", "default_drafts", "max_context"):
        number = getattr(capabilities, name)
        if number is not None and number < 1:
            raise PluginError(
                f"{label}: capabilities: {name} is {number}, but it has to be at least 1 or None"
            )
    if capabilities.q is not None and capabilities.drawn != "independent":
        raise PluginError(
            f"{label}: capabilities: q is {capabilities.q!r}, but drafts that are drawn "
            f"{capabilities.drawn!r} have no law of their own to hand over; only independent ones "
            "have"
        )
    for name in ("lookahead_slots", "workspace_bytes"):
        if getattr(capabilities, name) < 0:
            raise PluginError(
                f"{label}: capabilities: {name} is {getattr(capabilities, name)}, "
                "but it has to be at least 0"
            )
    if capabilities.lookahead_slots > MOST_LOOKAHEAD:
        raise PluginError(
            f"{label}: capabilities: lookahead_slots is {capabilities.lookahead_slots}; at most "
            f"{MOST_LOOKAHEAD} cache places beyond the committed tokens are kept per request"
        )
    for layer in capabilities.kv_layers:
        _check_layer(layer, label)
    most, usual = capabilities.max_drafts, capabilities.default_drafts
    if most is not None and usual is not None and usual > most:
        raise PluginError(
            f"{label}: capabilities: default_drafts is {usual}, more than max_drafts, {most}"
        )
    own = [_rule_name(rule, label) for rule in capabilities.verification]
    for name in own:
        if name in CORE_RULES:
            raise PluginError(f"{label} declares the rule {name!r}, which is core's own name")
        if own.count(name) > 1:
            raise PluginError(f"{label} declares the rule {name!r} twice")


def _check_layer(layer: KVLayer, label: str) -> None:
    for name in ("heads", "k_dim", "v_dim", "window"):
        number = getattr(layer, name)
        if number is None and name == "window":
            continue
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise PluginError(
                f"{label}: capabilities: {name} of a KVLayer is {number!r}, "
                "but it has to be an integer from 1 up"
            )
    if not isinstance(layer.dtype, torch.dtype | None):
        raise PluginError(
            f"{label}: capabilities: dtype of a KVLayer is {layer.dtype!r}, "
            "but it has to be a torch.dtype or None"
        )


def _rule_name(rule: object, label: str) -> str:
    if not isinstance(rule, VerificationRule):
        raise PluginError(
            f"{label}: capabilities: verification holds {rule!r}, "
            "but it has to hold VerificationRules"
        )
    return rule.name
