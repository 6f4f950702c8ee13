"""Hidden states of chosen layers, by hooks on these layers only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from specdec.errors import ConfigError, TargetError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle


class HiddenStateHooks:
    """Holds what the hooks of the running forward saw.

    They look away unless `watching`: the same modules may be run by their owner, or by another
    target with hooks of its own.
    """

    def __init__(self, decoder: nn.Module, layers: nn.ModuleList, name: str) -> None:
        self._decoder = decoder
        self._layers = layers
        self._name = name
        self._handles: list[RemovableHandle] = []
        self._captured: dict[int, Tensor] = {}
        self._post_norm: Tensor | None = None
        self._returns_post_norm = False
        self._watching = False

    def choose(self, ids: Sequence[int], *, post_norm: bool, pre_head: bool = False) -> None:
        """Replace the hooks. ids are 0 .. number of layers; anything else is a ConfigError.

        pre_head: keep the states after the final norm for `last_post_norm` as well.
        """
        count = len(self._layers)
        wrong = sorted(i for i in set(ids) if not 0 <= i <= count)
        if wrong:
            raise ConfigError(
                f"{self._name} has no capture id {wrong[0]}; ids are 0 (embedding output) to "
                f"{count} (last layer's output)"
            )
        self.remove()
        for i in sorted(set(ids)):
            if i < count:
                hook = self._layers[i].register_forward_pre_hook(
                    self._entering(i), with_kwargs=True
                )
            else:
                hook = self._layers[-1].register_forward_hook(self._leaving(i))
            self._handles.append(hook)
        self._returns_post_norm = post_norm
        if post_norm or pre_head:
            self._handles.append(self._decoder.register_forward_hook(self._normed))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Capture from the forward inside the block."""
        self.take()  # what one that raised has left behind
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    @property
    def last_post_norm(self) -> Tensor | None:
        """States after the final norm of the last forward, whoever asked for them."""
        return self._post_norm

    def take(self) -> tuple[dict[int, Tensor], Tensor | None]:
        """Hand over what the last forward captured, and forget it."""
        taken = self._captured, self._post_norm if self._returns_post_norm else None
        self._captured, self._post_norm = {}, None
        return taken

    def remove(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.take()

    def _entering(self, i: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(i, args[0] if args else kwargs["hidden_states"])

        return hook

    def _leaving(self, i: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._keep(i, output if isinstance(output, torch.Tensor) else output[0])

        return hook

    def _normed(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._watching:
            self._post_norm = output[0][0]

    def _keep(self, i: int, states: Tensor) -> None:
        if not self._watching:
            return
        if states.ndim != 3:
            raise TargetError(
                f"{self._name} has hidden states of shape {tuple(states.shape)} between layers; "
                "only [1, rows, hidden] can be captured"
            )
        self._captured[i] = states[0]
