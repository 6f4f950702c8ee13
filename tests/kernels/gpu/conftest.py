"""The Triton kernels, on a CUDA device if there is one, else under Triton's interpreter.

The same tests run in both places, at sizes an interpreter can bear; those marked `gpu` are at the
sizes of real models. The interpreter takes some 10 ms for a row and 40 ms for one that truncates:
a test has to be thrifty with rows.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specdec_kernels import Sampling, Verified, make_stream, reference

INTERPRETED = not torch.cuda.is_available()
_HERE = Path(__file__).parent


def _interpret() -> None:
    """Make Triton, from here on, the one that interprets.

    It decides that where it is first imported and where a kernel is decorated, and whatever was
    collected before this folder may have imported it (transformers does). Without a CUDA device
    nothing else can run a kernel, so nobody misses the Triton that this drops.
    """
    for name in list(sys.modules):
        triton = name == "triton" or name.startswith("triton.")
        # the compiled part registers its types once per process
        if (triton and not name.startswith("triton._C")) or name.startswith("specdec_kernels.gpu"):
            del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    # It looks for integers that overflow, to no end without its debug option, and patches
    # triton.language anew for every call within a kernel: two thirds of all its time.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch = interpreter._patch_lang
    patched: set[Any] = set()

    class Lasting:
        def restore(self) -> None:
            pass

    def patch_once(fn: Any) -> Lasting:
        if fn not in patched:
            patch(fn)
            patched.add(fn)
        return Lasting()

    interpreter._patch_lang = patch_once
    _remember_types(interpreter)


def _remember_types(interpreter: Any) -> None:
    """Work out the types and shapes of values once each: half of the time of what is left."""
    core = sys.modules["triton.language.core"]
    to_numpy, make = interpreter._get_np_dtype, core.block_type.__init__
    dtypes: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}

    def numpy_dtype(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = to_numpy(type)
        return dtypes[type.name]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in blocks:
            make(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = (*type.shape,) if type.is_block() else ()
        if sizes not in shapes:
            parts = core.tuple([core.constexpr(n) for n in sizes])
            shapes[sizes] = parts, core.constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    semantic = sys.modules["triton.language.semantic"].TritonSemantic
    broadcast = semantic.broadcast_impl_value

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    interpreter._get_np_dtype, semantic.broadcast_impl_value = numpy_dtype, broadcast_unlike
    core.block_type.__init__, core.tensor.__init__ = block, tensor


if INTERPRETED:
    _interpret()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(_HERE):
            continue
        item.add_marker(pytest.mark.triton)
        if INTERPRETED:
            # numpy warns of what is meant: -inf less -inf, and the largest float times more than 1
            for what in ("invalid value", "overflow", "divide by zero", "All-NaN slice"):
                ignore = f"ignore:{what} encountered:RuntimeWarning"
                item.add_marker(pytest.mark.filterwarnings(ignore))
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="session")
def kernels() -> Any:
    """The module with the kernels' `verify` and `sample`, whatever the device."""
    from specdec_kernels.gpu import verification

    return verification


@pytest.fixture(scope="session")
def interpreted() -> bool:
    return INTERPRETED


def _dirty(made: Tensor) -> Tensor:
    return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(-7)


@pytest.fixture(autouse=True)
def _dirty_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote holds NaN, or -7: in every test of this folder."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, **k: _dirty(make(*a, **k)))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> int:
    """Cut rows into tiles of 64 ids, so that a row of a few hundred has several; gives 64."""
    import specdec_kernels.gpu.verification  # noqa: F401  # and all that it uses

    for name, module in list(sys.modules.items()):
        for constant in ("TILE", "CAREFUL"):
            if name.startswith("specdec_kernels.gpu.") and hasattr(module, constant):
                monkeypatch.setattr(module, constant, 64)
    return 64


Numbers = float | Sequence[float]


@pytest.fixture
def make_sampling(device: torch.device) -> Callable[..., Sampling]:
    """Parameters of `slots` requests: each a number for all of them, or one per slot."""

    def make(
        slots: int,
        *,
        temperature: Numbers = 1.0,
        top_k: Numbers = 0,
        top_p: Numbers = 1.0,
        min_p: Numbers = 0.0,
        seed: int = 11,
    ) -> Sampling:
        def full(value: Numbers, dtype: torch.dtype) -> Tensor:
            return torch.tensor(value, dtype=dtype).expand(slots).clone().to(device)

        streams = [make_stream(seed, i) for i in range(slots)]
        return Sampling(
            torch.tensor(streams, dtype=torch.int64, device=device),
            full(temperature, torch.float32),
            full(top_k, torch.int64),
            full(top_p, torch.float32),
            full(min_p, torch.float32),
        )

    return make


class Batch(NamedTuple):
    """The arguments of `verify`, in its order."""

    logits: Tensor
    logits_start: Tensor
    draft_tokens: Tensor
    positions: Tensor
    slots: Tensor
    sampling: Sampling

    def of(self, requests: Sequence[int]) -> Batch:
        """These requests alone, in this order."""
        start = self.logits_start.tolist()
        rows = [r for b in requests for r in range(start[b], start[b + 1])]
        sizes = [0, *(start[b + 1] - start[b] for b in requests)]
        chosen = torch.tensor(requests, dtype=torch.int64, device=self.slots.device)
        return Batch(
            self.logits[rows],
            torch.tensor(sizes, device=self.slots.device).cumsum(0),
            self.draft_tokens[chosen],
            self.positions[rows],
            self.slots[chosen],
            self.sampling,
        )

    def row_slots(self) -> Tensor:
        """The slot of every row: what `sample` takes."""
        return self.slots.repeat_interleave(self.logits_start.diff())


@pytest.fixture
def make_batch(device: torch.device) -> Callable[..., Batch]:
    """Requests with `rows[b]` rows each; of their drafts about three in four are the target's."""

    def make(
        rows: Sequence[int],
        k: int,
        logits: Tensor,
        sampling: Sampling,
        *,
        truncate: bool = True,
        right: float = 0.75,
    ) -> Batch:
        start = torch.tensor([0, *rows]).cumsum(0).to(device)
        slots = torch.randperm(len(sampling.stream))[: len(rows)].to(device)
        positions = torch.randint(0, 2**32, (sum(rows),)).to(device)
        drafts = torch.randint(0, logits.shape[1], (len(rows), k)).to(device)
        batch = Batch(logits.to(device), start, drafts, positions, slots, sampling)
        own = reference.sample(
            batch.logits, positions, batch.row_slots(), sampling, truncate=truncate
        )
        for b, n in enumerate(rows):
            tested = min(n - 1, k)
            if tested > 0:
                keep = (torch.rand(tested) < right).to(device)
                first = int(start[b])
                drafts[b, :tested] = own[first : first + tested].where(keep, drafts[b, :tested])
        return batch

    return make


@pytest.fixture
def agree(kernels: Any) -> Callable[..., Verified]:
    """Verify a batch with the kernels, and see that the reference says the same.

    `near` requests may differ: on a device whose logarithms round otherwise, near-ties fall
    differently, about one in 10,000 rows.
    """

    def check(batch: Batch, *, truncate: bool = True, near: int = 0) -> Verified:
        out: Verified = kernels.verify(*batch, method="coupled", truncate=truncate)
        want = reference.verify(*batch, method="coupled", truncate=truncate)
        same = (out.tokens == want.tokens).all(1) & (out.rows == want.rows).all(1)
        same &= out.count == want.count
        wrong = (~same).nonzero().flatten().tolist()
        assert len(wrong) <= near, [
            (b, out.tokens[b].tolist(), want.tokens[b].tolist()) for b in wrong[:8]
        ]
        return out

    return check


def copy_of(folder: Path, name: str, fault: Sequence[str] | None) -> Any:
    """The kernels' `verification` as a package of its own, in tiles of 64 ids."""
    from specdec_kernels.gpu import verification

    (folder / name).mkdir()
    for path in Path(verification.__file__).parent.glob("*.py"):
        text = path.read_text()
        if fault is not None and path.stem == fault[0]:
            assert fault[1] in text, f"{path.name} has no {fault[1]!r} any more"
            text = text.replace(fault[1], fault[2])
        text = text.replace("specdec_kernels.gpu", name)
        text = text.replace("\nTILE = 4096\n", "\nTILE = 64\n")
        text = text.replace("\nCAREFUL = 1024", "\nCAREFUL = 64")
        (folder / name / path.name).write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module(f"{name}.verification")


@pytest.fixture
def faulty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreted: bool
) -> Iterator[Callable[[Sequence[str] | None], Any]]:
    """What copies the kernels with a fault put in: a file, the text that is there, and another."""
    if not interpreted:
        pytest.skip("a compiler would take minutes")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda fault: copy_of(tmp_path, "faulty_kernels", fault)
    for name in list(sys.modules):
        if name.split(".")[0] == "faulty_kernels":
            del sys.modules[name]
