"""Hook calls: what a plugin may look like, what it may answer, and whose fault an error is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import (
    Capabilities,
    ConfigError,
    Draft,
    PluginError,
    SlotState,
    Speculator,
    SpeculatorError,
    Step,
    TargetOutputs,
    Verdict,
    VerificationRule,
    hookimpl,
)
from specdec.session import Session
from specdec.types import StepReport
from specdec_kernels import DenseQ, EditInputs, SparseQ

BATCH, K, VOCAB, SLOTS, ROWS = 3, 2, 16, 5, 7
CPU = torch.device("cpu")
LABEL = "speculator 'toy' of specdec-plugin-toy 1.0"


def ints(*shape: int, value: int = 0) -> Tensor:
    return torch.full(shape, value, dtype=torch.int64)


def make_step() -> Step:
    per_slot = ints(SLOTS)
    floats = torch.zeros(SLOTS)
    state = SlotState(
        history=ints(SLOTS, 32), length=per_slot, computed=per_slot, prompt_length=per_slot,
        stream=per_slot, temperature=floats, top_k=per_slot, top_p=floats, min_p=floats,
        block_tables=ints(SLOTS, 4),
    )  # fmt: skip
    return Step(
        tokens=ints(ROWS), positions=ints(ROWS), query_start=torch.tensor([0, 3, 6, 7]),
        slots=torch.tensor([0, 3, 1]), num_drafts=torch.tensor([2, 2, 0]),
        is_prefill=ints(BATCH).bool(), samples=ints(BATCH, value=1).bool(),
        logits_rows=torch.arange(ROWS), predicted=torch.arange(ROWS) + 1,
        logits_start=torch.tensor([0, 3, 6, 7]),
        valid_rows=ints(BATCH, value=1), next_token=ints(BATCH, value=4), k=ints(BATCH, value=K),
        state=state,
    )  # fmt: skip


STEP = make_step()
OUTPUTS = TargetOutputs(captured={}, post_norm=None)
LOGITS = torch.zeros(ROWS, VOCAB)
DRAFT = Draft(tokens=ints(BATCH, K, value=5))
CORE = Verdict(
    tokens=ints(BATCH, K + 1, value=7), count=ints(BATCH, value=K + 1), rows=ints(BATCH, K + 1)
)


def make_report() -> StepReport:
    counts, flags = np.full(BATCH, K + 1), np.ones(BATCH, dtype=bool)
    return StepReport(
        slots=np.array([0, 3, 1]), is_decode=flags, drafted=counts - 1, accepted=counts - 1,
        emitted=counts, kept=counts, skipped=counts * 0 - 1, changes=None, ended=(),
        num_running=BATCH, num_waiting=0, num_preempted=0, free_blocks=1, num_blocks=9,
        prompt_tokens=0, seconds=0.1,
    )  # fmt: skip


REPORT = make_report()


class Toy(Speculator):
    """Answers what it was told to."""

    def __init__(self, answer: Any = DRAFT) -> None:
        self.answer = answer

    @hookimpl
    def propose(self, k: int) -> Any:
        return answered(self.answer)


def answered(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        raise answer
    return answer


class Featured(Toy):
    @hookimpl
    def extract_hidden_states(self, outputs: TargetOutputs) -> Any:
        return answered(self.answer)


RULES: Any = (VerificationRule("own", lossless=True),)
OWN = Capabilities(verification=RULES)


class Ruled(Toy):
    @hookimpl
    def verify(self, draft: Draft, logits: Tensor) -> Any:
        return answered(self.answer)


def core_verify(step: Step, draft: Draft, logits: Tensor, edits: EditInputs | None) -> Verdict:
    return CORE


def session(
    speculator: Any = None,
    *,
    rule: str = "coupled",
    capabilities: Capabilities | None = None,
    observers: Sequence[object] = (),
    device: torch.device = CPU,
    verify: Any = core_verify,
) -> Session:
    return Session(
        speculator,
        label=LABEL,
        rule=rule,
        verify=verify,
        vocab_size=VOCAB,
        device=device,
        capabilities=capabilities,
        observers=observers,
    )


def refused(speculator: Any, **more: Any) -> str:
    with pytest.raises(PluginError) as caught:
        session(speculator, **more)
    assert not isinstance(caught.value, SpeculatorError)
    said = str(caught.value)
    assert "\n" not in said
    return said


# --- what pluggy says nothing about ---------------------------------------


class WithDefault(Speculator):
    @hookimpl
    def propose(self, step: Step, k: int = 3) -> None: ...


class WithForeignDefault(Speculator):
    @hookimpl
    def propose(self, step: Step, temperature: float = 1.0) -> None: ...


class WithKeywordOnly(Speculator):
    @hookimpl
    def propose(self, step: Step, *, k: int) -> None: ...


class WithKwargs(Speculator):
    @hookimpl
    def propose(self, step: Step, **rest: object) -> None: ...


class WithArgs(Speculator):
    @hookimpl
    def propose(self, *rest: object) -> None: ...


class WithMisspeltArgument(Speculator):
    @hookimpl
    def propose(self, stp: Step) -> None: ...


class WithMisspeltHook(Toy):
    @hookimpl
    def extract_hidden_state(self, outputs: TargetOutputs) -> None: ...


class WithMisspeltSpecname(Toy):
    @hookimpl(specname="verfy")
    def anything(self) -> None: ...


class Unmarked(Speculator):
    def propose(self, step: Step) -> None: ...


class UnmarkedExtract(Toy):
    def extract_hidden_states(self, outputs: TargetOutputs) -> None: ...


class Last(Speculator):
    @hookimpl(trylast=True)
    def propose(self, step: Step) -> None: ...


class Wrapper(Toy):
    @hookimpl(wrapper=True)
    def step_finished(self) -> Any:
        return (yield)


class Generator(Speculator):
    @hookimpl
    def propose(self) -> Any:
        yield


class Coroutine(Speculator):
    @hookimpl
    async def propose(self) -> None: ...


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (WithDefault(), "its hook propose has a default for the argument 'k'"),
        (WithForeignDefault(), "its hook propose has a default for the argument 'temperature'"),
        (WithKeywordOnly(), "its hook propose has the keyword-only argument 'k'"),
        (WithKwargs(), "its hook propose has the variadic argument 'rest'"),
        (WithArgs(), "its hook propose has the variadic argument 'rest'"),
        (WithMisspeltArgument(), "has the unknown argument 'stp'; did you mean 'step'?"),
        (WithMisspeltArgument(), "(of: step, hidden, k)"),
        (WithMisspeltHook(), "is no hook; did you mean 'extract_hidden_states'?"),
        (WithMisspeltHook(), "(hooks: extract_hidden_states, propose, step_finished, verify)"),
        (WithMisspeltSpecname(), "'verfy' is no hook; did you mean 'verify'?"),
        (Unmarked(), "the method propose is not marked; put @specdec.hookimpl above it"),
        (UnmarkedExtract(), "the method extract_hidden_states is not marked"),
        (Speculator(), "does not implement the hook propose"),
        (Toy, "is the class Toy; give an instance of it"),
        (Last(), "its hook propose has the option trylast, which is not served"),
        (Wrapper(), "its hook step_finished has the option wrapper"),
        (Generator(), "its hook propose is a coroutine or a generator"),
        (Coroutine(), "its hook propose is a coroutine or a generator"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_plugin_that_would_be_called_wrongly_is_refused(plugin: Any, said: str) -> None:
    message = refused(plugin)
    assert message.startswith(LABEL)
    assert said in message


def test_a_hook_under_another_name_is_served() -> None:
    class Renamed(Speculator):
        @hookimpl(specname="propose")
        def draft(self, k: int) -> Draft:
            return DRAFT

    assert session(Renamed()).propose(STEP, None, K) is DRAFT


def test_properties_are_not_read_when_a_plugin_is_registered() -> None:
    class Careful(Toy):
        @property
        def weights(self) -> None:
            raise AssertionError("read")

    session(Careful())


def test_a_rule_needs_the_hook_and_the_hook_a_rule() -> None:
    assert "implements the hook verify but declares no rule" in refused(Ruled())
    assert "declares no rule" in refused(Ruled(), capabilities=Capabilities())
    assert "declares the verification rule 'own' but does not implement the hook verify" in refused(
        Toy(), capabilities=OWN
    )


@dataclass
class Counting:
    """An observer; a dataclass, so equal to another with the same fields."""

    steps: int = 0

    @hookimpl
    def step_finished(self) -> None:
        self.steps += 1


@dataclass(eq=False)
class Recording:
    seen: list[str] = field(default_factory=list)
    name: str = ""
    error: Exception | None = None

    @hookimpl
    def step_finished(self, verdict: Verdict) -> None:
        self.seen.append(self.name)
        if self.error is not None:
            raise self.error


def test_two_plugins_that_are_equal_are_told_how_not_to_be() -> None:
    said = refused(Toy(), observers=[Counting(), Counting()])
    assert said == (
        "observer Counting (1) equals observer Counting (0); plugins are told apart by identity, "
        "so leave __eq__ alone (eq=False in attrs and dataclasses)"
    )
    assert session(observers=[Counting(0), Counting(1)]).observers


def test_one_plugin_twice_is_refused() -> None:
    one = Recording()
    assert refused(Toy(), observers=[one, one]) == "observer Recording (1) is there twice"


def test_two_observers_of_one_class_are_both_called() -> None:
    seen: list[str] = []
    both = session(observers=[Recording(seen, "a"), Recording(seen, "b")])
    assert both.step_finished(STEP, CORE, REPORT) == []
    assert seen == ["b", "a"]


@pytest.mark.parametrize(
    ("observer", "said"),
    [
        (Toy(), "observer Toy (0) implements propose; an observer has the hook step_finished"),
        (object(), "observer object (0) implements none"),
        (Recording, "is the class Recording; give an instance"),
    ],
    ids=["proposes", "nothing", "class"],
)
def test_an_observer_only_observes(observer: object, said: str) -> None:
    assert said in refused(None, observers=[observer])


def test_an_observer_that_forgot_the_mark_is_refused() -> None:
    class Silent:
        def step_finished(self, step: Step) -> None: ...

    assert "the method step_finished is not marked" in refused(None, observers=[Silent()])


# --- core's defaults ------------------------------------------------------


def test_captured_layers_are_joined_in_ascending_order_then_the_post_norm_states() -> None:
    def layer(value: float) -> Tensor:
        return torch.full((ROWS, 2), float(value))

    outputs = TargetOutputs(captured={9: layer(9), 0: layer(0), 4: layer(4)}, post_norm=layer(99))
    hidden = session(Toy()).extract_hidden_states(STEP, outputs)
    assert hidden is not None
    assert hidden.tolist() == [[0, 0, 4, 4, 9, 9, 99, 99]] * ROWS
    only = session(Toy()).extract_hidden_states(STEP, attrs.evolve(outputs, post_norm=None))
    assert only is not None
    assert only.shape == (ROWS, 6)


def test_nothing_captured_gives_no_features() -> None:
    assert session(Toy()).extract_hidden_states(STEP, OUTPUTS) is None
    assert session(None).extract_hidden_states(STEP, OUTPUTS) is None


def test_a_speculators_features_come_before_cores() -> None:
    own = torch.ones(ROWS, 3)
    outputs = TargetOutputs(captured={0: torch.zeros(ROWS, 2)}, post_norm=None)
    assert session(Featured(own)).extract_hidden_states(STEP, outputs) is own
    left = session(Featured(None)).extract_hidden_states(STEP, outputs)
    assert left is not None
    assert left.shape == (ROWS, 2)


def test_nobody_drafts_without_a_speculator_or_if_it_answers_none() -> None:
    assert session(None).propose(STEP, None, K) is None
    assert session(Toy(None)).propose(STEP, None, K) is None


def test_hooks_get_the_arguments_they_name() -> None:
    class All(Speculator):
        @hookimpl
        def propose(self, k: int, hidden: Tensor, step: Step) -> None:
            self.got = (step, hidden, k)

    features = torch.zeros(ROWS, 1)
    plugin = All()
    session(plugin).propose(STEP, features, K)
    assert plugin.got[0] is STEP
    assert plugin.got[1] is features
    assert plugin.got[2] == K


def test_a_rule_of_its_own_is_asked_only_if_it_is_named() -> None:
    plugin = Ruled(AssertionError("asked"))
    for rule in ("coupled", "standard", "block", "synthetic"):
        unnamed = session(plugin, rule=rule, capabilities=OWN)
        assert unnamed.verify(STEP, DRAFT, LOGITS) is CORE
    named = session(plugin, rule="own", capabilities=OWN)
    with pytest.raises(SpeculatorError, match="asked"):
        named.verify(STEP, DRAFT, LOGITS)


# --- what may be answered -------------------------------------------------


def wrong(call: Any) -> str:
    with pytest.raises(SpeculatorError) as caught:
        call()
    said = str(caught.value)
    assert said.startswith(f"{LABEL} answered the hook ")
    return said.removeprefix(f"{LABEL} answered the hook ")


def tokens(value: Any) -> Draft:
    return Draft(tokens=value)


META = torch.device("meta")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ints(BATCH, K), "a tensor of shape [3, 2]; a specdec.Draft is expected"),
        (3, "a int; a specdec.Draft is expected"),
        (tokens([[1, 2]]), "draft tokens of type list; a tensor is expected"),
        (tokens(None), "draft tokens of type NoneType; a tensor is expected"),
        (tokens(ints(BATCH, K + 1)), "draft tokens of shape [3, 3]; [3, 2] is expected"),
        (tokens(ints(BATCH - 1, K)), "draft tokens of shape [2, 2]; [3, 2] is expected"),
        (tokens(ints(BATCH * K)), "draft tokens of shape [6]; [3, 2] is expected"),
        (tokens(ints(BATCH, K).int()), "draft tokens of dtype torch.int32; torch.int64 is"),
        (tokens(ints(BATCH, K).float()), "draft tokens of dtype torch.float32; torch.int64 is"),
        (tokens(ints(BATCH, K).to(META)), "draft tokens on meta; cpu is expected"),
        (tokens(ints(BATCH, K, value=-2)), "draft tokens that hold -2; -1 to 15 is expected"),
        (tokens(ints(BATCH, K, value=-(2**63))), "draft tokens that hold -9223372036854775808;"),
        (tokens(ints(BATCH, K, value=2**63 - 1)), "draft tokens that hold 9223372036854775807;"),
        (tokens(ints(BATCH, K, value=VOCAB)), "draft tokens that hold 16; -1 to 15 is expected"),
        (Draft(DRAFT.tokens, confidence=torch.ones(BATCH)), "confidence of shape [3]; [3, 2]"),
        (
            Draft(DRAFT.tokens, confidence=torch.ones(BATCH, K).double()),
            "confidence of dtype torch.float64; torch.float32",
        ),
        (Draft(DRAFT.tokens, confidence=torch.ones(BATCH, K, device=META)), "confidence on meta"),
        (Draft(DRAFT.tokens, parents=ints(BATCH, K)), "parents, which are reserved for trees"),
        (
            Draft(DRAFT.tokens, q=DenseQ(torch.zeros(SLOTS, K, VOCAB))),
            "q of type DenseQ; None, for",
        ),
    ],
)
def test_a_wrong_draft_is_refused(answer: Any, said: str) -> None:
    declared = Capabilities(writes_confidence=True)
    message = wrong(lambda: session(Toy(answer), capabilities=declared).propose(STEP, None, K))
    assert message.startswith(f"propose with {said}")


def test_confidence_has_to_be_declared() -> None:
    answer = Draft(DRAFT.tokens, confidence=torch.ones(BATCH, K))
    declared = Capabilities(writes_confidence=True)
    assert session(Toy(answer), capabilities=declared).propose(STEP, None, K) is answer
    message = wrong(lambda: session(Toy(answer)).propose(STEP, None, K))
    assert message.startswith("propose with confidence, which its capabilities do not declare")


def test_drafts_may_be_short_or_none_at_all() -> None:
    for value in (-1, 0, VOCAB - 1):
        answer = tokens(ints(BATCH, K, value=value))
        assert session(Toy(answer)).propose(STEP, None, K) is answer


@pytest.mark.parametrize("nothing", [ints(BATCH, 0), torch.tensor([[]] * BATCH)])
def test_an_answer_without_columns_may_be_of_any_dtype(nothing: Tensor) -> None:
    draft = session(Toy(tokens(nothing))).propose(STEP, None, 0)
    assert draft is not None
    assert draft.tokens.dtype == torch.int64
    assert draft.tokens.shape == (BATCH, 0)


def test_ids_are_not_read_on_a_device() -> None:
    answer = tokens(torch.empty(BATCH, K, dtype=torch.int64, device=META))
    assert session(Toy(answer), device=META).propose(STEP, None, K) is answer
    said = wrong(lambda: session(Toy(DRAFT), device=META).propose(STEP, None, K))
    assert said.endswith("draft tokens on cpu; meta is expected")


def test_a_device_without_a_number_is_any_of_its_kind() -> None:
    here = tokens(torch.empty(BATCH, K, dtype=torch.int64, device="meta"))
    one = torch.device("meta", 1)
    assert session(Toy(here), device=one).propose(STEP, None, K) is here


DENSE = Capabilities(q="dense", drawn="independent")
SPARSE = Capabilities(q="sparse", drawn="independent")
GOOD_DENSE = DenseQ(torch.zeros(SLOTS, K + 1, VOCAB - 2))
GOOD_SPARSE = SparseQ(ints(SLOTS, K, 4), torch.zeros(SLOTS, K, 4))


@pytest.mark.parametrize(
    ("capabilities", "q"),
    [
        (DENSE, GOOD_DENSE),
        (SPARSE, GOOD_SPARSE),
        (DENSE, DenseQ(torch.zeros(SLOTS, K, VOCAB, dtype=torch.bfloat16))),
        # a dimension of one entry has no order, and the others may lie as they like
        (DENSE, DenseQ(torch.zeros(SLOTS, 1, K).transpose(1, 2))),
        (DENSE, DenseQ(torch.zeros(K, SLOTS, VOCAB).transpose(0, 1))),
        (DENSE, GOOD_DENSE._replace(lse=torch.zeros(SLOTS, K))),
    ],
)
def test_q_of_the_declared_form_is_taken(capabilities: Capabilities, q: Any) -> None:
    answer = Draft(DRAFT.tokens, q=q)
    assert session(Toy(answer), capabilities=capabilities).propose(STEP, None, K) is answer


@pytest.mark.parametrize(
    ("capabilities", "q", "said"),
    [
        (DENSE, GOOD_SPARSE, "q of type SparseQ; a DenseQ is expected"),
        (SPARSE, GOOD_DENSE, "q of type DenseQ; a SparseQ is expected"),
        (DENSE, torch.zeros(SLOTS, K, VOCAB), "q of type Tensor; a DenseQ is expected"),
        (DENSE, DenseQ([1]), "q.logits of type list; a tensor is expected"),  # type: ignore[arg-type]
        (
            DENSE,
            DenseQ(torch.zeros(BATCH, K, VOCAB)),
            "q.logits of shape [3, 2, 16]; [5 slots, 2 or",
        ),
        (
            DENSE,
            DenseQ(torch.zeros(SLOTS, K - 1, VOCAB)),
            "q.logits of shape [5, 1, 16]; [5 slots,",
        ),
        (DENSE, DenseQ(torch.zeros(SLOTS, K)), "q.logits of shape [5, 2]; [5 slots, 2 or more"),
        (DENSE, DenseQ(torch.zeros(SLOTS, K, 2, device=META)), "q.logits on meta; cpu is"),
        (DENSE, DenseQ(GOOD_DENSE.logits, 1.0), "q.lse of type float; a tensor is expected"),  # type: ignore[arg-type]
        (DENSE, GOOD_DENSE._replace(lse=torch.zeros(SLOTS, K, 1)), "q.lse of shape [5, 2, 1]; [5"),
        (
            DENSE,
            GOOD_DENSE._replace(lse=torch.zeros(SLOTS, K).double()),
            "q.lse of dtype torch.float64; torch.float32 is expected",
        ),
        (SPARSE, SparseQ(ints(3, K, 4), torch.zeros(SLOTS, K, 4)), "q.ids of shape [3, 2, 4]"),
        (
            DENSE,
            DenseQ(ints(SLOTS, K, VOCAB)),
            "q.logits of dtype torch.int64; a float dtype is expected",
        ),
        (
            SPARSE,
            SparseQ(ints(SLOTS, K, 4).int(), torch.zeros(SLOTS, K, 4)),
            "q.ids of dtype torch.int32; torch.int64 is expected",
        ),
        (
            SPARSE,
            SparseQ(ints(SLOTS, K, 4), torch.zeros(SLOTS, K, 3)),
            "q.ids of shape [5, 2, 4] and q.logits of shape [5, 2, 3]; one shape for both is",
        ),
        (
            SPARSE,
            SparseQ(ints(SLOTS, K, 4), torch.zeros(SLOTS, K + 1, 4)),
            "q.ids of shape [5, 2, 4] and q.logits of shape [5, 3, 4]; one shape for both is",
        ),
        (DENSE, DenseQ(torch.zeros(SLOTS, K, 0)), "q.logits without columns; 1 or more is"),
        (
            DENSE,
            DenseQ(torch.zeros(SLOTS, VOCAB, K).transpose(1, 2)),
            "q.logits of strides [32, 1, 2]; a contiguous last dimension is expected",
        ),
    ],
)
def test_a_wrong_q_is_refused(capabilities: Capabilities, q: Any, said: str) -> None:
    answer = Draft(DRAFT.tokens, q=q)
    message = wrong(lambda: session(Toy(answer), capabilities=capabilities).propose(STEP, None, K))
    assert message.startswith(f"propose with {said}")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (3, "a int; features [7 rows, width] is expected"),
        (torch.zeros(ROWS), "a tensor of shape [7]; features [7 rows, width] is expected"),
        (torch.zeros(1, ROWS, 4), "a tensor of shape [1, 7, 4]; features [7 rows, width]"),
        (torch.zeros(ROWS - 1, 4), "a tensor of shape [6, 4]; features [7 rows, width]"),
        (ints(ROWS, 4), "features of dtype torch.int64; a float dtype is expected"),
        (torch.zeros(ROWS, 4, device=META), "features on meta; cpu is expected"),
    ],
)
def test_wrong_features_are_refused(answer: Any, said: str) -> None:
    message = wrong(lambda: session(Featured(answer)).extract_hidden_states(STEP, OUTPUTS))
    assert message.startswith(f"extract_hidden_states with {said}")


# request 0 has two drafts, request 1 one draft, request 2 none, request 3 draws nothing
TESTED = attrs.evolve(
    STEP,
    slots=torch.tensor([0, 3, 1, 2]),
    num_drafts=torch.tensor([2, 1, 0, 0]),
    logits_start=torch.tensor([0, 3, 5, 6, 6]),
)
UNDER_TEST = Draft(tokens=torch.tensor([[3, 4], [5, -1], [-1, -1], [-1, -1]]))
GOOD = Verdict(
    tokens=torch.tensor([[3, 4, 9], [8, -1, -1], [0, -1, -1], [-1, -1, -1]]),
    count=torch.tensor([3, 1, 1, 0]),
    rows=torch.tensor([[0, 1, 2], [3, -1, -1], [5, -1, -1], [-1, -1, -1]]),
)
WIDE = (4, K + 1)


def judged(answer: Any, step: Step = TESTED, device: torch.device = CPU) -> Verdict:
    own = session(Ruled(answer), rule="own", capabilities=OWN, device=device)
    return own.verify(step, UNDER_TEST, LOGITS)


def cut(name: str, value: Any) -> Verdict:
    return attrs.evolve(GOOD, **{name: value})


def changed(**places: tuple[Any, int]) -> Verdict:
    """The good verdict with single entries changed."""
    fields = {name: getattr(GOOD, name).clone() for name in places}
    for name, (place, value) in places.items():
        fields[name][place] = value
    return attrs.evolve(GOOD, **fields)


def test_a_verdict_that_fits_its_step_is_taken() -> None:
    assert judged(GOOD) is GOOD
    one = changed(count=(0, 2), tokens=((0, 2), -1), rows=((0, 2), -1))
    assert judged(one) is one
    # a refused draft may be followed by any token, the draft itself included
    again = changed(tokens=((1, 0), 5))
    assert judged(again) is again


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "None; a specdec.Verdict is expected"),
        (ints(*WIDE), "a tensor of shape [4, 3]; a specdec.Verdict is expected"),
        (cut("tokens", ints(4, K)), "emitted tokens of shape [4, 2]; [4, 3] is expected"),
        (cut("tokens", ints(*WIDE).int()), "emitted tokens of dtype torch.int32"),
        (cut("tokens", ints(*WIDE, value=VOCAB)), "emitted tokens that hold 16; -1 to 15"),
        (cut("tokens", ints(*WIDE).to(META)), "emitted tokens on meta; cpu is expected"),
        (cut("count", ints(4, 1)), "counts of shape [4, 1]; [4] is expected"),
        (cut("count", ints(4).float()), "counts of dtype torch.float32; torch.int64"),
        (cut("rows", ints(4, K)), "rows of shape [4, 2]; [4, 3] is expected"),
        (cut("rows", None), "rows of type NoneType; a tensor is expected"),
        # a request emits something exactly if it has rows, and no more than it has
        (changed(count=(0, K + 2)), "a count of 4 for request 0, which has 2 drafts and 3 rows"),
        (changed(count=(0, -(2**63))), "a count of -9223372036854775808 for request 0, which"),
        (
            changed(count=(1, 3), tokens=(1, 5), rows=(1, 4)),
            "a count of 3 for request 1, which has 1 drafts and 2 rows of logits; 1 to 2 is",
        ),
        (
            changed(count=(2, 0), tokens=((2, 0), -1), rows=((2, 0), -1)),
            "a count of 0 for request 2, which has 0 drafts and 1 rows of logits; 1 to 1 is",
        ),
        (
            changed(count=(3, 1), tokens=((3, 0), 7), rows=((3, 0), 5)),
            "a count of 1 for request 3, which has 0 drafts and 0 rows of logits; 0 is expected",
        ),
        # as many tokens as counted
        (
            changed(tokens=((1, 1), 7)),
            "tokens [8, 7, -1] and a count of 1 for request 1; that many tokens, then -1, is",
        ),
        (changed(tokens=((0, 1), -1)), "tokens [3, -1, 9] and a count of 3 for request 0; that"),
        # all but the last are the drafts
        (
            changed(tokens=((0, 1), 5)),
            "tokens [3, 5, 9] for request 0, whose drafts are [3, 4]; its first drafts, then one",
        ),
        # row by row
        (changed(rows=((0, 1), 2)), "rows [0, 2, 2] for request 0; [0, 1, 2] is expected"),
        (changed(rows=((1, 0), 0)), "rows [0, -1, -1] for request 1; [3, -1, -1] is expected"),
        (changed(rows=((2, 1), 6)), "rows [5, 6, -1] for request 2; [5, -1, -1] is expected"),
        (changed(rows=((0, 0), 2**63 - 1)), "rows [9223372036854775807, 1, 2] for request 0;"),
    ],
)
def test_a_wrong_verdict_is_refused(answer: Any, said: str) -> None:
    message = wrong(lambda: judged(answer))
    assert message.startswith(f"verify under its own rule 'own' with {said}")


def test_a_verdict_is_not_read_on_a_device() -> None:
    def unread(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=META)

    answer = Verdict(tokens=unread(*WIDE), count=unread(4), rows=unread(*WIDE))
    assert judged(answer, device=META) is answer


# --- whose fault ----------------------------------------------------------

CALLS: dict[str, Callable[[BaseException], object]] = {
    "propose": lambda error: session(Toy(error)).propose(STEP, None, K),
    "extract_hidden_states": lambda error: session(Featured(error)).extract_hidden_states(
        STEP, OUTPUTS
    ),
    "verify": lambda error: session(Ruled(error), rule="own", capabilities=OWN).verify(
        STEP, DRAFT, LOGITS
    ),
}


@pytest.mark.parametrize("hook", sorted(CALLS))
@pytest.mark.parametrize("error", [ValueError("bad"), ConfigError("bad"), SpeculatorError("bad")])
def test_what_a_speculator_raises_names_it_and_the_hook(hook: str, error: Exception) -> None:
    with pytest.raises(SpeculatorError) as caught:
        CALLS[hook](error)
    assert str(caught.value) == (f"{LABEL} raised {type(error).__name__} in the hook {hook}: bad")
    assert caught.value.__cause__ is error
    assert error.__traceback__ is not None


@pytest.mark.parametrize("hook", sorted(CALLS))
def test_an_interrupt_passes(hook: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        CALLS[hook](KeyboardInterrupt())


def test_what_core_raises_is_not_blamed_on_the_speculator() -> None:
    def broken(step: Step, draft: Draft, logits: Tensor, edits: EditInputs | None) -> Verdict:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        session(Toy(), verify=broken).verify(STEP, DRAFT, LOGITS)
    odd = TargetOutputs(captured={0: torch.zeros(ROWS, 2), 1: torch.zeros(1, 2)}, post_norm=None)
    for plugin in (Toy(), Featured(None)):
        with pytest.raises(RuntimeError, match="Sizes of tensors"):
            session(plugin).extract_hidden_states(STEP, odd)


# --- observers ------------------------------------------------------------


def test_an_observer_that_raises_is_reported_and_called_no_more() -> None:
    seen: list[str] = []
    error = RuntimeError("full disk")
    good, bad = Recording(seen, "good"), Recording(seen, "bad", error)
    both = session(observers=[good, bad])
    assert both.step_finished(STEP, CORE, REPORT) == [(bad, error)]
    assert seen == ["bad", "good"]
    assert error.__notes__ == ["raised by observer Recording (1) in the hook step_finished"]
    assert both.step_finished(STEP, CORE, REPORT) == []
    assert seen == ["bad", "good", "good"]
    assert both.observers == [good]


def test_a_speculator_that_fails_to_observe_goes_on_drafting() -> None:
    class Observing(Toy):
        @hookimpl
        def step_finished(self, step: Step) -> None:
            raise RuntimeError("no")

    plugin = Observing()
    watched = session(plugin)
    assert [o for o, _ in watched.step_finished(STEP, CORE, REPORT)] == [plugin]
    assert watched.step_finished(STEP, CORE, REPORT) == []
    assert watched.propose(STEP, None, K) is DRAFT


def test_an_observer_gets_what_it_names() -> None:
    got: list[object] = []

    class Report:
        @hookimpl
        def step_finished(self, report: StepReport) -> None:
            got.append(report)

    class All:
        @hookimpl
        def step_finished(self, report: StepReport, verdict: Verdict, step: Step) -> None:
            got.extend([report, verdict, step])

    both = session(observers=[Report(), All()])
    assert both.step_finished(STEP, CORE, REPORT) == []
    assert [id(x) for x in got] == [id(x) for x in (REPORT, CORE, STEP, REPORT)]


def test_sessions_do_not_know_each_other() -> None:
    one, two = Recording(), Recording()
    session(Toy(), observers=[one]).step_finished(STEP, CORE, REPORT)
    session(Toy(), observers=[two])
    assert (one.seen, two.seen) == ([""], [])
