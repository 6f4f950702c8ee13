"""Microseconds of one call of each verification kernel, from CUDA graph replays.

    python benchmarks/kernels.py [--batch 1 16 64 256] [--drafts 5] [--vocab 128256] [--json FILE]

Needs a CUDA device. Every case is captured once over as many sets of logits as fill the cache
twice, so that no call finds its input there; a call's time is the median replay over the calls in
it. The floor is the bytes that have to move (target rows once, q rows once where the rule reads
them) at the bandwidth that a device-to-device copy reaches in the same run. Baselines: the same in
straightforward torch, and that compiled. Tokens are compared with the reference's on the way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from environment import environment

from specdec_kernels import DenseQ, Sampling, reference, verify

DEVICE = torch.device("cuda")
WARM = 0.25  # seconds of replays before those that count
CACHE = 128 << 20  # bytes that rotating inputs fill at least: twice the L2 of an H200 and more


@attrs.frozen
class Case:
    """What one row of the table measures."""

    name: str
    method: str
    temperature: float
    top_p: float = 1.0
    dense_q: bool = False
    lse: bool = False  # q comes with the log-sum-exp of its rows

    def floor(self, batch: int, drafts: int, vocab: int, size: int) -> int:
        """Bytes that have to be read at least."""
        rows = batch * (drafts + 1)
        draft_rows = batch * drafts if self.dense_q and not self.lse else 0
        again = 0
        if self.method in ("standard", "block"):
            again = batch * (2 if self.dense_q else 1)  # the row whose draft is refused
        if self.method == "block":
            again += 2 * batch * (drafts - 1)
        return (rows + draft_rows + again) * vocab * size


CASES = [
    Case("greedy", "coupled", 0.0),
    Case("coupled T=1", "coupled", 1.0),
    Case("coupled T=0.7", "coupled", 0.7),
    Case("coupled T=1 top-p 0.95", "coupled", 1.0, top_p=0.95),
    Case("standard dense q T=1", "standard", 1.0, dense_q=True),
    Case("standard dense q with lse T=1", "standard", 1.0, dense_q=True, lse=True),
    Case("standard one-hot T=1", "standard", 1.0),
    Case("block dense q T=1", "block", 1.0, dense_q=True),
    Case("block dense q with lse T=1", "block", 1.0, dense_q=True, lse=True),
    Case("standard dense q T=1 top-p 0.95", "standard", 1.0, top_p=0.95, dense_q=True),
    Case("block dense q T=1 top-p 0.95", "block", 1.0, top_p=0.95, dense_q=True),
]


@attrs.frozen
class Inputs:
    """One call's arguments."""

    logits: Tensor
    logits_start: Tensor
    drafts: Tensor
    positions: Tensor
    slots: Tensor
    sampling: Sampling
    q: DenseQ | None
    truncate: bool

    def verify(self, method: str, op: Callable[..., Any] = verify) -> Any:
        """Run the op on them."""
        return op(
            self.logits, self.logits_start, self.drafts, self.positions, self.slots, self.sampling,
            method=method, q=self.q, truncate=self.truncate,
        )  # fmt: skip


def inputs(case: Case, batch: int, drafts: int, vocab: int, seed: int) -> Inputs:
    """Normal logits (sigma 3); drafts from a perturbed copy of them, 4 of 5 the target's own."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    rows = batch * (drafts + 1)
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device=DEVICE)
    logits.normal_(0, 3, generator=generator)
    full = torch.ones(batch, device=DEVICE)
    sampling = Sampling(
        stream=torch.randint(1 << 62, (batch,), device=DEVICE, generator=generator),
        temperature=full * case.temperature,
        top_k=torch.zeros(batch, dtype=torch.int64, device=DEVICE),
        top_p=full * case.top_p,
        min_p=full * 0,
    )
    positions = torch.arange(rows, device=DEVICE)
    slots = torch.arange(batch, device=DEVICE)
    own = reference.sample(logits, positions, slots.repeat_interleave(drafts + 1), sampling)
    own = own.view(batch, drafts + 1)[:, :drafts]
    other = torch.randint(vocab, own.shape, device=DEVICE, generator=generator)
    chosen = torch.rand(own.shape, device=DEVICE, generator=generator) < 0.8
    q = None
    if case.dense_q:
        noise = torch.empty(batch, drafts, vocab, dtype=torch.bfloat16, device=DEVICE)
        noise.normal_(0, 0.5, generator=generator)
        cache = logits.view(batch, drafts + 1, vocab)[:, :drafts] + noise
        q = DenseQ(cache, cache.float().logsumexp(-1) if case.lse else None)
    return Inputs(
        logits=logits,
        logits_start=torch.arange(0, rows + 1, drafts + 1, device=DEVICE),
        drafts=torch.where(chosen, own, other).contiguous(),
        positions=positions,
        slots=slots,
        sampling=sampling,
        q=q,
        truncate=case.top_p < 1,
    )


def replay(calls: Sequence[Callable[[], object]], repeat: int = 15) -> float:
    """Median microseconds of one of the calls, captured together."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    until = time.perf_counter() + WARM  # an idle device runs at a fraction of its clock
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / (replay([lambda: target.copy_(source)] * 4) * 1e-6)


def straightforward(given: Inputs, case: Case) -> Callable[[], object] | None:
    """The same rule as one would write it in torch, with torch's own random numbers."""
    batch, drafts = given.drafts.shape
    if case.top_p < 1 or case.method == "block":
        return None

    def match(tokens: Tensor) -> Tensor:
        tokens = tokens.view(batch, drafts + 1)
        accepted = (tokens[:, :drafts] == given.drafts).long().cumprod(1).sum(1)
        column = torch.arange(drafts + 1, device=DEVICE)
        return tokens.where(column <= accepted[:, None], -1)

    def greedy() -> Tensor:
        return match(given.logits.argmax(-1))

    def coupled() -> Tensor:
        p = (given.logits.float() / given.sampling.temperature[0]).softmax(-1)
        return match((p / torch.empty_like(p).exponential_()).argmax(-1))

    def standard() -> Tensor:
        vocab = given.logits.shape[1]
        p = given.logits.float().softmax(-1).view(batch, drafts + 1, vocab)
        q = torch.zeros_like(p)
        if given.q is not None:
            q[:, :drafts] = given.q.logits.float().softmax(-1)
        else:
            q[:, :drafts].scatter_(2, given.drafts[..., None], 1.0)
        at = given.drafts[..., None]
        ratio = p[:, :drafts].gather(2, at) / q[:, :drafts].gather(2, at)
        passed = torch.rand_like(ratio) < ratio
        accepted = passed.squeeze(-1).long().cumprod(1).sum(1)
        row = accepted[:, None, None].expand(-1, 1, vocab)
        rest = (p.gather(1, row) - q.gather(1, row)).clamp(min=0).squeeze(1)
        token = (rest / torch.empty_like(rest).exponential_()).argmax(-1)
        column = torch.arange(drafts + 1, device=DEVICE)
        tokens = torch.cat([given.drafts, token[:, None]], 1)
        tokens = tokens.scatter(1, accepted[:, None], token[:, None])
        return tokens.where(column <= accepted[:, None], -1)

    if case.method == "standard":
        return standard
    return greedy if case.temperature == 0 else coupled


def differences(given: Inputs, method: str) -> int:
    """Requests whose tokens are not the reference's."""
    got, want = given.verify(method), given.verify(method, reference.verify)
    return int((got.tokens != want.tokens).any(1).sum())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run every case; returns the report."""
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows: list[dict[str, Any]] = []
    cases = [case for case in CASES if not args.cases or case.name in args.cases]
    for vocab, drafts, batch in itertools.product(args.vocab, args.drafts, args.batch):
        for case in cases:
            size = batch * (drafts + 1) * vocab * 2 * (2 if case.dense_q else 1)
            sets = [
                inputs(case, batch, drafts, vocab, seed) for seed in range(max(1, CACHE // size))
            ]
            wrong = sum(differences(given, case.method) for given in sets[:4])
            calls = [partial(given.verify, case.method) for given in sets]
            row: dict[str, Any] = {
                "case": case.name, "vocab": vocab, "drafts": drafts, "batch": batch,
                "microseconds": replay(calls),
                "floor": case.floor(batch, drafts, vocab, 2) / bandwidth * 1e6,
                "different_from_reference": wrong, "compared": min(len(sets), 4) * batch,
            }  # fmt: skip
            if args.baselines:
                plain = [straightforward(given, case) for given in sets[:4]]
                if plain[0] is not None:
                    row["torch"] = replay([call for call in plain if call is not None])
                    if args.compile:
                        compiled = torch.compile(plain[0], dynamic=False)
                        row["torch_compiled"] = replay([compiled])
            rows.append(row)
            print(line(row), flush=True)
            del sets, calls
    return {
        "environment": environment(),
        "device": torch.cuda.get_device_name(),
        "copy_bandwidth": bandwidth,
        "cases": rows,
    }


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    text = (
        f"V={row['vocab']} k={row['drafts']} B={row['batch']:<4} {row['case']:<32} "
        f"{row['microseconds']:8.1f} us  floor {row['floor']:6.1f}  "
        f"x{row['microseconds'] / max(row['floor'], 1e-9):.2f}"
    )
    for name in ("torch", "torch_compiled"):
        if name in row:
            text += f"  {name} {row[name]:.0f}"
    if row["different_from_reference"]:
        text += f"  DIFFERENT {row['different_from_reference']} of {row['compared']}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--drafts", type=int, nargs="+", default=[5])
    parser.add_argument("--vocab", type=int, nargs="+", default=[128256])
    parser.add_argument("--cases", nargs="+", default=[], help="names; all where left out")
    parser.add_argument("--baselines", action="store_true", help="straightforward torch, too")
    parser.add_argument("--compile", action="store_true", help="and that compiled (slow to start)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    report = measure(args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
