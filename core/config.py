"""What the user says of speculation, checked and typed.

`SpeculativeConfig` holds the keys that every method shares; the rest waits in `extra` until the
speculator's class is known. `resolve` then gives the `SpeculatorConfig` that its `load` gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from specdec import config_text
from specdec._structure import check_keys, field_names, shown, structure
from specdec.acceptance import check_length, check_rates
from specdec.config_keys import NEUTRAL_VALUES, REFUSED_KEYS, REFUSED_METHODS
from specdec.errors import ConfigError, PluginError, listed, nearest
from specdec.length_table import check_ranges
from specdec.speculator import Speculator

DEFAULT_DRAFTS = 5
_LEAST_PREFIX = 3  # letters of a key from which a longer one is guessed
CORE_RULES = ("coupled", "standard", "block", "synthetic")
DraftSampling = Literal["greedy", "probabilistic", "coupled"]
PolicyName = Literal["fixed", "falling"]


@attrs.frozen(kw_only=True)
class SpeculativeConfig:
    """The keys every method shares. vLLM's names, so that a configuration can be pasted.

    method: name of a speculator, or a `specdec.Speculator` class itself; may be left out if the
        checkpoint `model` tells it.
    model: checkpoint of the drafter, a folder or Hub id; methods without one need none.
    revision, code_revision: of `model` on the Hub.
    num_speculative_tokens: drafts per step and request; by default what the speculator or its
        checkpoint says, else 5.
    num_speculative_tokens_per_batch_size: (first, last, drafts) ranges of the number of running
        requests; gaps keep the drafts of the range before. Never more than
        `num_speculative_tokens`.
    length_policy: "fixed" drafts as many as asked for; "falling" drafts fewer for a request
        whose drafts fail and more again when they hold.
    rejection_sample_method: "coupled" (default), "standard", "block", "synthetic", or a rule of
        the speculator's own.
    draft_sample_method: how a drafter draws: "greedy", "probabilistic" or "coupled"; by default
        coupled under coupled verification, else probabilistic.
    synthetic_acceptance_rates: probability that the first i + 1 drafts are all accepted, one
        per draft, not increasing; only with "synthetic".
    synthetic_acceptance_length: mean tokens per step instead of rates, bonus token included.
    max_model_len: longest sequence to draft for; beyond it a request decodes plainly.
    enforce_eager: run the speculator without captured graphs, which the CPU loop always does.
    """

    method: str | type[Speculator] | None = None
    model: str | None = None
    revision: str | None = None
    code_revision: str | None = None
    num_speculative_tokens: int | None = None
    num_speculative_tokens_per_batch_size: list[Any] | None = None
    length_policy: PolicyName = "fixed"
    rejection_sample_method: str = "coupled"
    draft_sample_method: DraftSampling | None = None
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_acceptance_length: float | None = None
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    extra: dict[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Check every key, then the keys against each other."""
        values = attrs.asdict(self, recurse=False)
        check_keys(type(self), values, "speculative_config")
        for key in ("method", "model", "rejection_sample_method"):
            if isinstance(values[key], str) and not values[key].strip():
                raise ConfigError(f"speculative_config: {key} is empty")
        for key in ("num_speculative_tokens", "max_model_len"):
            if values[key] is not None and values[key] < 1:
                raise ConfigError(f"{key} is {shown(values[key])}, but it has to be at least 1")
        if self.num_speculative_tokens_per_batch_size is not None:
            check_ranges(self.num_speculative_tokens_per_batch_size)
        self._check_rule()

    def _check_rule(self) -> None:
        rule = self.rejection_sample_method
        if rule in REFUSED_METHODS:
            raise ConfigError(
                f"rejection_sample_method={rule!r} is refused: {REFUSED_METHODS[rule]}"
            )
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if rule == "synthetic" and (rates is None) == (length is None):
            raise ConfigError(
                "rejection_sample_method='synthetic' needs exactly one of "
                "synthetic_acceptance_rates and synthetic_acceptance_length, not "
                + ("none" if rates is None else "both")
            )
        if rates is not None:
            self._needs_synthetic("synthetic_acceptance_rates")
            check_rates(rates, self.num_speculative_tokens)
        if length is not None:
            self._needs_synthetic("synthetic_acceptance_length")
            check_length(length, self.num_speculative_tokens)
        if self.draft_sample_method == "coupled" and rule in ("standard", "block", "synthetic"):
            raise ConfigError(
                f"draft_sample_method='coupled' is refused with rejection_sample_method={rule!r}: "
                "the rule tests p against q and takes drafts to be independent of the noise it "
                "draws with; use rejection_sample_method='coupled' or "
                "draft_sample_method='probabilistic'"
            )

    def _needs_synthetic(self, key: str) -> None:
        if self.rejection_sample_method != "synthetic":
            raise ConfigError(f"{key} needs rejection_sample_method='synthetic'")

    @classmethod
    def parse(
        cls, value: SpeculativeConfig | Mapping[str, Any] | str | None
    ) -> SpeculativeConfig | None:
        """Read a dict, JSON text or a short string (`specdec.config_text`); None is plain decoding.

        Raises:
            ConfigError: text that cannot be read, or a shared key with a wrong value.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = config_text.parse(value)
        if not isinstance(value, Mapping):
            raise ConfigError(
                "speculative_config has to be a dict, JSON text, a string like "
                f"'METHOD:num_speculative_tokens=4' or None, not {type(value).__name__}"
            )
        shared: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        names = [n for n in field_names(cls) if n != "extra"]
        for raw, item in value.items():
            if not isinstance(raw, str):
                raise ConfigError(f"the key {shown(raw)} of speculative_config is no text")
            key = raw.replace("-", "_")
            if key in shared or key in extra:
                raise ConfigError(f"the key {shown(key)} stands twice in speculative_config")
            if isinstance(item, Path):
                item = str(item)
            (shared if key in names else extra)[key] = item
        config = structure(cls, shared, "speculative_config")
        if config.method is None and config.model is None:
            guess = next((hint for key in extra if (hint := _guess(key, names))), ";")
            raise ConfigError(
                f"speculative_config names neither a method nor a model{guess} "
                "write {'method': NAME} or just the name ('specdec plugins' lists them)"
            )
        return attrs.evolve(config, extra=extra)

    def resolve(self, speculator: type[Speculator], method: str) -> SpeculatorConfig:
        """Check the remaining keys against the speculator's own and give it what it loads from.

        Raises:
            ConfigError: a key that neither core nor the speculator knows, or a wrong value.
            PluginError: the speculator's `Options` cannot be used.
        """
        options_class: object = speculator.Options
        if not (isinstance(options_class, type) and attrs.has(options_class)):
            raise PluginError(
                f"{method!r}: {speculator.__name__}.Options is {shown(options_class)}; "
                "it has to be an attrs class, such as one under @attrs.frozen"
            )
        own = field_names(options_class)
        shared = [n for n in field_names(type(self)) if n != "extra"]
        if taken := set(own) & set(shared):
            raise PluginError(
                f"the options of {method!r} have the key {min(taken)!r}, which every method shares "
                "and which would never reach them; rename it"
            )
        for key, value in self.extra.items():
            if key in own:
                continue
            if key in REFUSED_KEYS:
                if _asks_for_nothing(key, value):
                    continue
                raise ConfigError(f"{key}={shown(value)} is refused: {REFUSED_KEYS[key]}")
            raise ConfigError(
                f"{method!r} has no key {shown(key)}{_guess(key, [*own, *shared])} "
                f"(its own: {listed(own)}; shared: {listed(shared)})"
            )
        for key in ("model", "revision", "code_revision"):
            value = getattr(self, key)
            if value is not None and not speculator.reads_model and value != method:
                raise ConfigError(
                    f"{key}={shown(value)} is refused: {method!r} loads no checkpoint of its own"
                )
        options = {k: v for k, v in self.extra.items() if k in own}
        return SpeculatorConfig(
            method=method,
            model=self.model,
            revision=self.revision,
            code_revision=self.code_revision,
            num_speculative_tokens=self.num_speculative_tokens,
            rejection_sample_method=self.rejection_sample_method,
            draft_sample_method=self.draft_sample_method
            or ("coupled" if self.rejection_sample_method == "coupled" else "probabilistic"),
            max_model_len=self.max_model_len,
            enforce_eager=bool(self.enforce_eager),
            options=structure(speculator.Options, options, f"the options of {method!r}"),
        )


@attrs.frozen(kw_only=True)
class SpeculatorConfig:
    """What `Speculator.load` is given: the shared keys that concern it, and its own options.

    num_speculative_tokens: None if the user left it to the speculator.
    draft_sample_method: "greedy", "probabilistic" or "coupled"; never None.
    options: an instance of the speculator's `Options`.
    """

    method: str  # the name it was found under
    model: str | None  # its checkpoint: a folder or Hub id
    revision: str | None  # of `model` on the Hub
    code_revision: str | None  # of code that comes with `model`
    num_speculative_tokens: int | None
    rejection_sample_method: str
    draft_sample_method: DraftSampling
    max_model_len: int | None  # longest sequence to draft for
    enforce_eager: bool  # without captured graphs
    options: Any


def _guess(key: str, names: list[str]) -> str:
    """As `nearest`; else the shortest name that starts with the key."""
    begun = sorted((n for n in names if n.startswith(key) and len(key) >= _LEAST_PREFIX), key=len)
    return nearest(key, names) or (f"; did you mean {begun[0]!r}?" if begun else "")


def _asks_for_nothing(key: str, value: object) -> bool:
    """Whether a key that is refused has the value that stands for what is done anyway."""
    if value is None or value is False:
        return True
    neutral = NEUTRAL_VALUES.get(key)
    return neutral is not None and type(value) is type(neutral) and value == neutral
