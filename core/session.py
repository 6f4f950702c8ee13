"""One speculator behind typed, checked hook calls: pluggy is not seen outside this file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy
import torch

from specdec.errors import PluginError, SpecdecError, SpeculatorError, nearest
from specdec.hookspecs import PROJECT, Hooks, hookimpl
from specdec.types import Draft, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.speculator import Speculator
    from specdec.types import Capabilities, Step, TargetOutputs

HOOKS = ("extract_hidden_states", "propose", "verify", "step_finished")


class _Manager(pluggy.PluginManager):
    """A manager that refuses the signatures pluggy accepts and then never calls rightly."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        opts = super().parse_hookimpl_opts(plugin, name)  # type: ignore[arg-type]
        if opts is None:
            return None
        for parameter in inspect.signature(getattr(plugin, name)).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY):
                kind = "keyword-only" if parameter.kind is parameter.KEYWORD_ONLY else "variadic"
                problem = f"the {kind} argument {parameter.name!r}"
            elif parameter.default is not parameter.empty:
                problem = f"a default for the argument {parameter.name!r}"
            else:
                continue
            raise PluginError(
                f"the hook {name} of {type(plugin).__name__} has {problem}; "
                "name only the arguments you need, plain and without defaults"
            )
        return opts


class _Core:
    """Core's own answers, asked last."""

    def __init__(self, verify: Callable[[Step, Draft, Tensor], Verdict]) -> None:
        self._verify = verify

    @hookimpl(trylast=True)
    def extract_hidden_states(self, outputs: TargetOutputs) -> Tensor | None:
        parts = [outputs.captured[i] for i in sorted(outputs.captured)]
        if outputs.post_norm is not None:
            parts.append(outputs.post_norm)
        return torch.cat(parts, dim=-1) if parts else None

    @hookimpl(trylast=True)
    def verify(self, step: Step, draft: Draft, logits: Tensor) -> Verdict:
        return self._verify(step, draft, logits)


class Session:
    """The hooks of one run: core's defaults, one speculator and any observers.

    speculator: an instance; None decodes plainly.
    label: how errors name it, e.g. `speculator 'ngram' of specdec-plugin-ngram 0.1.0`.
    rule: the verification method in force.
    verify: core's own verification, for every rule that the speculator does not bring along.
    vocab_size, device: what drafts are checked against.
    """

    def __init__(
        self,
        speculator: Speculator | None,
        *,
        label: str,
        rule: str,
        verify: Callable[[Step, Draft, Tensor], Verdict],
        vocab_size: int,
        device: torch.device,
        capabilities: Capabilities | None = None,
        observers: Iterable[object] = (),
    ) -> None:
        self.label = label
        self.vocab_size = vocab_size
        self.device = device
        self._manager = _Manager(PROJECT)
        self._manager.add_hookspecs(Hooks)
        self._register(_Core(verify), "specdec-core")
        self.observers: list[object] = []
        others = []
        if speculator is not None:
            self._register(speculator, label)
            own = {r.name for r in capabilities.verification} if capabilities else set()
            self._check_speculator(speculator, own)
            if rule not in own:
                others.append(speculator)
        for observer in observers:
            self._register(observer, f"observer {type(observer).__name__}")
            self.observers.append(observer)
        hook = self._manager.hook
        self._extract = hook.extract_hidden_states
        self._propose = hook.propose
        # a rule of the speculator's own runs only if the configuration names it
        self._verify = self._manager.subset_hook_caller("verify", others)

    def _register(self, plugin: object, label: str) -> None:
        if isinstance(plugin, type):
            raise PluginError(f"{label} is the class {plugin.__name__}; register an instance of it")
        try:
            self._manager.register(plugin, name=label)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, PluginError, ValueError) as error:
            self._manager.unregister(plugin) if self._manager.is_registered(plugin) else None
            unknown = _unknown_hook(plugin)
            hint = f"; {unknown[0]!r} is no hook{nearest(unknown[0], HOOKS)}" if unknown else ""
            raise PluginError(f"{label} does not fit the hooks: {error}{hint}") from error

    def _check_speculator(self, speculator: Speculator, own: set[str]) -> None:
        written = {
            c.name for c in self._manager.get_hookcallers(speculator) or () if c.name in HOOKS
        }
        for name in HOOKS:
            if callable(getattr(speculator, name, None)) and name not in written:
                raise PluginError(
                    f"{self.label}: the method {name} is not marked; "
                    "put @specdec.hookimpl above it"
                )
        if "propose" not in written:
            raise PluginError(f"{self.label} does not implement the hook propose")
        if "verify" in written and not own:
            raise PluginError(
                f"{self.label} implements the hook verify but declares no rule; "
                "name it in Capabilities.verification"
            )
        if own and "verify" not in written:
            raise PluginError(
                f"{self.label} declares the verification rule {sorted(own)[0]!r} but does not "
                "implement the hook verify"
            )

    def extract_hidden_states(self, step: Step, outputs: TargetOutputs) -> Tensor | None:
        """Features of this step's rows, [rows, width], or None if nobody asked for any."""
        hidden = self._call("extract_hidden_states", self._extract, step=step, outputs=outputs)
        if hidden is None:
            return None
        self._check_tensor("extract_hidden_states", "the features", hidden)
        if hidden.ndim != 2 or hidden.shape[0] != step.tokens.shape[0]:
            raise self._wrong(
                "extract_hidden_states",
                f"features of shape {list(hidden.shape)}; "
                f"[{step.tokens.shape[0]} rows, width] is expected",
            )
        return hidden

    def propose(self, step: Step, hidden: Tensor | None, k: int) -> Draft | None:
        """The drafts of the step, checked; None if nobody drafts."""
        draft = self._call("propose", self._propose, step=step, hidden=hidden, k=k)
        if draft is None:
            return None
        if not isinstance(draft, Draft):
            raise self._wrong("propose", f"{type(draft).__name__}; a specdec.Draft is expected")
        self._check_ids("propose", "draft tokens", draft.tokens, (step.batch, k))
        if draft.confidence is not None:
            self._check_tensor("propose", "the confidence", draft.confidence)
            if draft.confidence.shape != (step.batch, k):
                raise self._wrong(
                    "propose",
                    f"confidence of shape {list(draft.confidence.shape)}; "
                    f"[{step.batch} requests, {k} drafts] is expected",
                )
        if draft.parents is not None:
            raise self._wrong("propose", "parents; trees are reserved and not served yet")
        return draft

    def verify(self, step: Step, draft: Draft, logits: Tensor) -> Verdict:
        """The verdict of the rule in force, checked."""
        verdict = self._call("verify", self._verify, step=step, draft=draft, logits=logits)
        if not isinstance(verdict, Verdict):
            raise self._wrong("verify", f"{type(verdict).__name__}; a specdec.Verdict is expected")
        batch, k = draft.tokens.shape
        self._check_ids("verify", "emitted tokens", verdict.tokens, (batch, k + 1))
        for name, value, shape in (
            ("count", verdict.count, (batch,)),
            ("rows", verdict.rows, (batch, k + 1)),
        ):
            self._check_tensor("verify", name, value)
            if value.shape != shape:
                raise self._wrong(
                    "verify",
                    f"{name} of shape {list(value.shape)}; {list(shape)} is expected",
                )
        return verdict

    def step_finished(self, step: Step, verdict: Verdict) -> list[tuple[object, Exception]]:
        """Call every observer, the last registered first; return those that raised.

        An observer that raised is taken off: it is called no more.
        """
        failed: list[tuple[object, Exception]] = []
        for impl in reversed(self._manager.hook.step_finished.get_hookimpls()):
            arguments = {"step": step, "verdict": verdict}
            try:
                impl.function(*(arguments[a] for a in impl.argnames))
            except Exception as error:  # an observer must not harm the requests
                error.add_note(f"raised by {impl.plugin_name} in the hook step_finished")
                self._manager.unregister(impl.plugin)
                self.observers = [o for o in self.observers if o is not impl.plugin]
                failed.append((impl.plugin, error))
        return failed

    def _call(self, name: str, hook: Callable[..., Any], **arguments: object) -> Any:
        try:
            return hook(**arguments)
        except SpecdecError as error:
            error.add_note(f"raised by {self.label} in the hook {name}")
            raise
        except Exception as error:
            wrapped = SpeculatorError(
                f"{self.label} raised {type(error).__name__} in the hook {name}: {error}"
            )
            raise wrapped from error

    def _wrong(self, hook: str, what: str) -> SpeculatorError:
        return SpeculatorError(f"{self.label} answered the hook {hook} with {what}")

    def _check_tensor(self, hook: str, what: str, value: object) -> None:
        if not isinstance(value, torch.Tensor):
            raise self._wrong(hook, f"{what} of type {type(value).__name__}; a tensor is expected")
        if value.device != self.device:
            raise self._wrong(hook, f"{what} on {value.device}; {self.device} is expected")

    def _check_ids(self, hook: str, what: str, value: object, shape: Sequence[int]) -> None:
        self._check_tensor(hook, what, value)
        assert isinstance(value, torch.Tensor)
        if value.dtype != torch.int64:
            raise self._wrong(hook, f"{what} of dtype {value.dtype}; torch.int64 is expected")
        if tuple(value.shape) != tuple(shape):
            raise self._wrong(
                hook, f"{what} of shape {list(value.shape)}; {list(shape)} is expected"
            )
        # reading values would stall a device; there the kernels treat such ids as no draft
        if self.device.type == "cpu" and value.numel():
            low, high = (int(x) for x in torch.aminmax(value))
            if low < -1 or high >= self.vocab_size:
                bad = low if low < -1 else high
                raise self._wrong(
                    hook,
                    f"{what} that hold the id {bad}; "
                    f"-1 or 0 to {self.vocab_size - 1} is expected",
                )


def _unknown_hook(plugin: object) -> list[str]:
    """Names of marked methods that are no hooks."""
    return [
        name
        for name in dir(type(plugin))
        if hasattr(getattr(type(plugin), name, None), f"{PROJECT}_impl") and name not in HOOKS
    ]
