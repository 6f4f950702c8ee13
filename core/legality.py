"""Which speculator may run under which verification: decided from capabilities alone."""

from __future__ import annotations

import attrs

from specdec.config import CORE_RULES, DEFAULT_DRAFTS, SpeculativeConfig
from specdec.errors import ConfigError, PluginError, listed, nearest
from specdec.types import Capabilities, VerificationRule

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
    rules = {**_CORE, **{r.name: r for r in capabilities.verification}}
    for rule in capabilities.verification:
        if rule.name in CORE_RULES:
            raise PluginError(f"{label} declares the rule {rule.name!r}, which is core's own name")
    name = config.rejection_sample_method
    if name not in rules:
        raise ConfigError(
            f"rejection_sample_method={name!r} is neither core's nor of {label}"
            f"{nearest(name, rules)} (known: {listed(rules)})"
        )
    rule = rules[name]
    if capabilities.drawn not in _DRAWN.values():
        raise PluginError(
            f"{label} says its drafts are drawn {capabilities.drawn!r} (known: "
            f"{listed(_DRAWN.values())})"
        )
    if capabilities.drawn == "coupled" and not rule.accepts_coupled:
        raise ConfigError(
            f"{label} draws its drafts with the target's own noise (coupled), which biases "
            f"rejection_sample_method={name!r}; use 'coupled', or draft_sample_method="
            "'probabilistic'"
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
