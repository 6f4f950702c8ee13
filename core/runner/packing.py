"""Replace layers of a float32 model on a CPU by faster ones, or by ones that are exact."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from specdec.runner.activation import fix_activations
from specdec.runner.linear import pack_linears, packable, packed_blocks, probe_blocks
from specdec.runner.linear_groups import Siblings, recording
from specdec.runner.lookup import shorten_lookups
from specdec.runner.norm import replace_norms

if TYPE_CHECKING:
    from torch import nn

    from specdec.runner.row_blocks import RowBlocks

logger = logging.getLogger(__name__)


def pack_model(
    model: nn.Module,
    head: nn.Module,
    forward: Callable[[], object],
    *,
    deterministic: bool,
) -> RowBlocks | None:
    """Replace linear layers and, by mode, activations or norms in place.

    forward: runs the model once on a row or two; it shows which layers share their input.
    deterministic: a row's bits do not depend on its company. Return the blocks to plan for each
        forward then, None otherwise.
    """
    siblings = _siblings(model, forward)
    blocks = None
    if deterministic:
        blocks = packed_blocks(model) or probe_blocks(model, siblings)
        fix_activations(model, blocks)
    else:
        norms = replace_norms(model)
        logger.debug("%d norms replaced", norms)
    count = pack_linears(model, head=head, blocks=blocks, siblings=siblings)
    logger.debug("%d linear layers packed", count)
    shorten_lookups(model)
    return blocks


def _siblings(model: nn.Module, forward: Callable[[], object]) -> Siblings:
    layers = [module for module in model.modules() if packable(module)]
    try:
        # No inference mode: the recording asks tensors whether they were written to.
        with torch.inference_mode(False), torch.no_grad(), recording(layers) as calls:
            forward()
    except Exception as error:  # whatever a model's own code raises
        logger.debug("no linear layers share a product: %s: %s", type(error).__name__, error)
        return {}
    return calls.siblings(model)
