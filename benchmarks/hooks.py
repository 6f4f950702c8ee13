"""What the hook calls of one step cost: extract_hidden_states, propose and verify, with checks.

    python benchmarks/hooks.py [--batch 8] [--drafts 5] [--repeats 20000] [--json]

A speculator that returns a stored draft and a core verification that returns a stored verdict:
what is left is the calls through pluggy and the checks of the answers. `step` is the three calls
in a row; a rule of the speculator's own, whose verdict is checked too, is measured beside it.
The budget is 25 µs a step; exit status 1 if the median is above.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import attrs
import torch

from specdec import (
    Capabilities,
    Draft,
    SlotState,
    Speculator,
    Step,
    TargetOutputs,
    Verdict,
    VerificationRule,
    hookimpl,
)
from specdec.session import Session

BUDGET = 25.0  # µs
VOCAB = 151_936
WARM_UP = 2000
TOGETHER = 10  # steps timed as one, so that the clock's own cost does not count


class Stored(Speculator):
    """Answers every hook with what it holds."""

    def __init__(self, draft: Draft, features: torch.Tensor) -> None:
        self.draft = draft
        self.features = features

    @hookimpl
    def extract_hidden_states(self, outputs: TargetOutputs) -> torch.Tensor:
        """The stored features."""
        return self.features

    @hookimpl
    def propose(self, step: Step, hidden: torch.Tensor, k: int) -> Draft:
        """The stored draft."""
        return self.draft


class StoredRule(Stored):
    """Brings a rule of its own, whose answers are checked as well."""

    def __init__(self, draft: Draft, features: torch.Tensor, verdict: Verdict) -> None:
        super().__init__(draft, features)
        self.verdict = verdict

    @hookimpl
    def verify(self, step: Step, draft: Draft, logits: torch.Tensor) -> Verdict:
        """The stored verdict."""
        return self.verdict


def make_step(batch: int, drafts: int, device: torch.device) -> Step:
    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    rows = batch * (drafts + 1)
    start = torch.arange(0, rows + 1, drafts + 1, device=device)
    slot, floats = ints(batch), torch.zeros(batch, device=device)
    state = SlotState(
        history=ints(batch, 64), length=slot, computed=slot, prompt_length=slot, stream=slot,
        temperature=floats, top_k=slot, top_p=floats, min_p=floats, block_tables=ints(batch, 4),
    )  # fmt: skip
    return Step(
        tokens=ints(rows), positions=ints(rows), query_start=start, slots=slot,
        num_drafts=slot + drafts, is_prefill=slot.bool(), samples=slot.bool(),
        logits_rows=ints(rows), predicted=ints(rows), logits_start=start, valid_rows=slot,
        next_token=slot, k=slot, state=state,
    )  # fmt: skip


def measure(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median and quartiles in µs of one call."""
    for _ in range(WARM_UP):
        call()
    taken = []
    for _ in range(max(repeats // TOGETHER, 3)):
        start = time.perf_counter_ns()
        for _ in range(TOGETHER):
            call()
        taken.append((time.perf_counter_ns() - start) / TOGETHER / 1000)
    low, middle, high = statistics.quantiles(taken, n=4)
    return {"median": round(middle, 2), "quartile_1": round(low, 2), "quartile_3": round(high, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=20_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(1)
    device, batch, k = torch.device(args.device), args.batch, args.drafts
    step = make_step(batch, k, device)
    tokens = torch.randint(0, VOCAB, (batch, k + 1), device=device)
    draft = Draft(tokens=tokens[:, :k].contiguous())
    count = torch.full((batch,), k + 1, device=device)
    rows = torch.arange(batch * (k + 1), device=device).view(batch, k + 1)
    verdict = Verdict(tokens=tokens, count=count, rows=rows)
    features = torch.zeros(batch * (k + 1), 64, device=device)
    logits = torch.zeros(batch * (k + 1), 8, device=device)
    outputs = TargetOutputs(captured={}, post_norm=None)
    own = VerificationRule("own", lossless=True)

    def make_session(speculator: Speculator, rule: str, capabilities: Capabilities) -> Session:
        return Session(
            speculator,
            label="speculator 'stored'",
            rule=rule,
            verify=lambda step, draft, logits, edits: verdict,
            vocab_size=VOCAB,
            device=tokens.device,
            capabilities=capabilities,
        )

    session = make_session(Stored(draft, features), "coupled", Capabilities())
    declared = attrs.evolve(Capabilities(), verification=(own,))
    ruled = make_session(StoredRule(draft, features, verdict), "own", declared)

    def whole_step() -> None:
        hidden = session.extract_hidden_states(step, outputs)
        session.propose(step, hidden, k)
        session.verify(step, draft, logits)

    microseconds = {
        "extract_hidden_states": measure(
            lambda: session.extract_hidden_states(step, outputs), args.repeats
        ),
        "propose": measure(lambda: session.propose(step, features, k), args.repeats),
        "verify": measure(lambda: session.verify(step, draft, logits), args.repeats),
        "step": measure(whole_step, args.repeats),
        "verify, own rule": measure(lambda: ruled.verify(step, draft, logits), args.repeats),
    }
    result = {
        "microseconds": microseconds,
        "budget": BUDGET,
        "batch": batch,
        "drafts": k,
        "repeats": args.repeats,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "pluggy", "specdec-core")},
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        for name, taken in microseconds.items():
            spread = f"{taken['quartile_1']:.2f} to {taken['quartile_3']:.2f}"
            print(f"{name:24}{taken['median']:8.2f} µs  (half of them {spread})")
        print(f"budget                  {BUDGET:8.2f} µs  on {result['device']}")
    return int(microseconds["step"]["median"] > BUDGET)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
