"""One speculator behind typed, checked hook calls: pluggy is not seen outside this file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pluggy
import torch

from specdec._answers import Answers
from specdec.errors import PLUGIN_ERRORS, PluginError, SpeculatorError, blame, listed, nearest
from specdec.hookspecs import PROJECT, Hooks, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.speculator import Speculator
    from specdec.types import Capabilities, Draft, Step, StepReport, TargetOutputs, Verdict
    from specdec_kernels import EditInputs

HOOKS = ("extract_hidden_states", "propose", "verify", "step_finished")


class _Manager(pluggy.PluginManager):
    """A manager that refuses what pluggy accepts and then never calls, or calls wrongly."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        opts = super().parse_hookimpl_opts(plugin, name)
        if opts is None or isinstance(plugin, _Core):
            return opts
        hook = opts.get("specname") or name
        if hook not in HOOKS:
            raise PluginError(f"{hook!r} is no hook{nearest(hook, HOOKS)} (hooks: {listed(HOOKS)})")
        method = getattr(plugin, name)
        for option in ("wrapper", "hookwrapper", "trylast", "optionalhook"):
            if opts.get(option):
                raise PluginError(f"its hook {name} has the option {option}, which is not served")
        if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
            raise PluginError(f"its hook {name} is a coroutine or a generator; make it a function")
        known = list(inspect.signature(getattr(Hooks, hook)).parameters)[1:]
        for parameter in inspect.signature(method).parameters.values():
            problem = _problem(parameter, known)
            if problem:
                raise PluginError(
                    f"its hook {name} has {problem}; name only the arguments it needs, plain and "
                    f"without defaults (of: {', '.join(known)})"
                )
        return opts


def _problem(parameter: inspect.Parameter, known: list[str]) -> str | None:
    """What is wrong with an argument of a hook, if anything."""
    if parameter.kind is parameter.KEYWORD_ONLY:
        return f"the keyword-only argument {parameter.name!r}"
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return f"the variadic argument {parameter.name!r}"
    if parameter.default is not parameter.empty:
        return f"a default for the argument {parameter.name!r}"
    if parameter.name not in known:
        return f"the unknown argument {parameter.name!r}{nearest(parameter.name, known)}"
    return None


class _Core:
    """Core's own answers, asked last."""

    @hookimpl(trylast=True)
    def extract_hidden_states(self, outputs: TargetOutputs) -> Tensor | None:
        parts = [outputs.captured[i] for i in sorted(outputs.captured)]
        parts += [part for part in (outputs.post_norm, outputs.pre_head) if part is not None]
        return torch.cat(parts, dim=-1) if parts else None


class Session:
    """The hooks of one run: core's defaults, one speculator and any observers.

    speculator: an instance; None decodes plainly.
    label: how errors name it, e.g. `speculator 'x' of specdec-plugin-x 0.1.0`.
    rule: the verification method in force.
    verify: core's own verification, for every rule that the speculator does not bring along. It
        also edits the logits, as it reads them.
    vocab_size, device: what drafts are checked against.
    capabilities: of the speculator; without them it has no rule of its own.
    observers: instances with the hook `step_finished`.

    What raises in the speculator, or what it answers wrongly, is a `SpeculatorError` that names
    it and the hook; what core raises passes unchanged.
    """

    def __init__(
        self,
        speculator: Speculator | None,
        *,
        label: str,
        rule: str,
        verify: Callable[[Step, Draft, Tensor, EditInputs | None], Verdict],
        vocab_size: int,
        device: torch.device,
        capabilities: Capabilities | None = None,
        observers: Iterable[object] = (),
    ) -> None:
        self.label = label
        self.observers = list(observers)
        self._host_tokens = bool(capabilities and capabilities.host_tokens)
        self._answers = Answers(
            label,
            vocab_size,
            device,
            capabilities.q if capabilities else None,
            confidence=bool(capabilities and capabilities.writes_confidence),
        )
        self._manager = _Manager(PROJECT)
        self._manager.add_hookspecs(Hooks)
        self._manager.register(_Core(), name="specdec-core")
        own = {r.name for r in capabilities.verification} if capabilities else set()
        if speculator is not None:
            self._register(speculator, label)
            self._check_speculator(speculator, own)
        for number, observer in enumerate(self.observers):
            name = f"observer {type(observer).__name__} ({number})"
            self._register(observer, name)
            self._check_observer(observer, name)
        hook = self._manager.hook
        self._extract = hook.extract_hidden_states
        self._propose = hook.propose
        self._finished = list(reversed(hook.step_finished.get_hookimpls()))
        # a rule of the speculator's own runs only if the configuration names it
        self._rule = rule if rule in own else None
        self._verify: Callable[..., Any] = verify if self._rule is None else hook.verify

    def _register(self, plugin: object, label: str) -> None:
        if isinstance(plugin, type):
            raise PluginError(f"{label} is the class {plugin.__name__}; give an instance of it")
        for name, other in self._manager.list_name_plugin():
            if other is plugin:
                raise PluginError(f"{label} is there twice")
            if other == plugin:
                raise PluginError(
                    f"{label} equals {name}; plugins are told apart by "
                    "identity, so leave __eq__ alone (eq=False in attrs and dataclasses)"
                )
        try:
            self._manager.register(plugin, name=label)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, PluginError, ValueError) as error:
            raise PluginError(f"{label} does not fit the hooks: {error}") from error

    def _written(self, plugin: object, label: str) -> set[str]:
        """Hooks that the plugin implements; a method of their name without the mark is refused."""
        written = {c.name for c in self._manager.get_hookcallers(plugin) or ()}
        for name in HOOKS:
            if name not in written and callable(getattr(type(plugin), name, None)):
                raise PluginError(
                    f"{label}: the method {name} is not marked; put @specdec.hookimpl above it"
                )
        return written

    def _check_speculator(self, speculator: Speculator, own: set[str]) -> None:
        written = self._written(speculator, self.label)
        if "propose" not in written:
            raise PluginError(f"{self.label} does not implement the hook propose")
        if "verify" in written and not own:
            raise PluginError(
                f"{self.label} implements the hook verify but declares no rule; "
                "name it in Capabilities.verification"
            )
        if own and "verify" not in written:
            raise PluginError(
                f"{self.label} declares the verification rule {min(own)!r} but does not "
                "implement the hook verify"
            )

    def _check_observer(self, observer: object, label: str) -> None:
        written = self._written(observer, label)
        if written != {"step_finished"}:
            raise PluginError(
                f"{label} implements {listed(written)}; an observer has the hook step_finished "
                "and no other"
            )

    def extract_hidden_states(self, step: Step, outputs: TargetOutputs) -> Tensor | None:
        """Features of this step's rows, [rows, width], or None if nobody asked for any."""
        try:
            hidden = self._extract(step=step, outputs=outputs)
        except PLUGIN_ERRORS as error:
            if _passed_core(error.__traceback__):
                raise
            raise self._raised("extract_hidden_states", error) from error
        if hidden is None:
            return None
        return self._answers.features(hidden, step.tokens.shape[0])

    def propose(self, step: Step, hidden: Tensor | None, k: int) -> Draft | None:
        """The drafts of the step, checked; None if nobody drafts."""
        try:
            draft = self._propose(step=step, hidden=hidden, k=k)
        except PLUGIN_ERRORS as error:
            raise self._raised("propose", error) from error
        if draft is None:
            return None
        return self._answers.draft(draft, step.batch, k, step.state.length.shape[0])

    @property
    def own_rule(self) -> bool:
        """Whether the rule in force is the speculator's, which reads logits that are edited."""
        return self._rule is not None

    def verify(
        self, step: Step, draft: Draft, logits: Tensor, edits: EditInputs | None = None
    ) -> Verdict:
        """The verdict of the rule in force; checked unless core gave it.

        edits: for core's rules alone, what is still to be done to the logits.
        """
        if self._rule is None:
            drawn: Verdict = self._verify(step, draft, logits, edits)
            return drawn
        assert edits is None, "a speculator's rule is given logits that are edited"
        try:
            verdict = self._verify(step=step, draft=draft, logits=logits)
        except PLUGIN_ERRORS as error:
            raise self._raised("verify", error) from error
        return self._answers.verdict(verdict, self._rule, step, draft.tokens)

    def step_finished(
        self, step: Step, verdict: Verdict, report: StepReport
    ) -> list[tuple[object, BaseException]]:
        """Call every observer, the last registered first; return those that raised.

        One that raised is called no more; a speculator that observes keeps its other hooks.
        """
        if not self._finished:
            return []
        failed: list[tuple[object, BaseException]] = []
        arguments = {"step": step, "verdict": verdict, "report": report}
        for impl in list(self._finished):
            try:
                impl.function(*(arguments[a] for a in impl.argnames))
            except PLUGIN_ERRORS as error:  # an observer must not harm the requests
                error.add_note(f"raised by {impl.plugin_name} in the hook step_finished")
                self._finished.remove(impl)
                self.observers = [o for o in self.observers if o is not impl.plugin]
                failed.append((impl.plugin, error))
        return failed

    def _raised(self, hook: str, error: BaseException) -> SpeculatorError:
        said = blame(self.label, error, f"the hook {hook}")
        if isinstance(error, AttributeError) and "NoneType" in said and not self._host_tokens:
            said += " (step.host is None unless the capabilities say host_tokens=True)"
        return SpeculatorError(said)


def _passed_core(traceback: TracebackType | None) -> bool:
    """Whether core's own implementation of a hook is among the frames."""
    while traceback is not None:
        if traceback.tb_frame.f_code is _CORE_EXTRACT:
            return True
        traceback = traceback.tb_next
    return False


_CORE_EXTRACT = _Core.extract_hidden_states.__code__
