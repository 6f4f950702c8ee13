"""specdec: a plugin framework for speculative decoding.

Importing this package loads neither torch nor any plugin; `LLM` does when it is made.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specdec.errors import (
    ConfigError,
    OutOfMemoryError,
    PluginError,
    ProcessorError,
    PromptError,
    SpecdecError,
    SpeculatorError,
    TargetError,
)
from specdec.hookspecs import hookimpl

if TYPE_CHECKING:
    from specdec.async_llm import AsyncLLM
    from specdec.config import SpeculativeConfig, SpeculatorConfig
    from specdec.llm import LLM
    from specdec.logits_processors import LogitsRows, row_by_row
    from specdec.logprobs import Logprob
    from specdec.metrics import SpeculationMetrics
    from specdec.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from specdec.sampling_params import SamplingParams
    from specdec.speculator import Speculator
    from specdec.types import (
        Capabilities,
        Draft,
        EndedRequest,
        HostStep,
        KVLayer,
        Pools,
        RequestChanges,
        RequestInfo,
        SlotState,
        Step,
        StepReport,
        TargetInfo,
        TargetOutputs,
        Verdict,
        VerificationRule,
    )

__version__ = "0.1.0"

_HOME = {
    "SpeculativeConfig": "config",
    "SpeculatorConfig": "config",
    "AsyncLLM": "async_llm",
    "LLM": "llm",
    "LogitsRows": "logits_processors",
    "row_by_row": "logits_processors",
    "Logprob": "logprobs",
    "SpeculationMetrics": "metrics",
    "CompletionOutput": "outputs",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "Speculator": "speculator",
    "Capabilities": "types",
    "Draft": "types",
    "EndedRequest": "types",
    "HostStep": "types",
    "KVLayer": "types",
    "Pools": "types",
    "RequestChanges": "types",
    "RequestInfo": "types",
    "SlotState": "types",
    "Step": "types",
    "StepReport": "types",
    "TargetInfo": "types",
    "TargetOutputs": "types",
    "Verdict": "types",
    "VerificationRule": "types",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Capabilities",
    "CompletionOutput",
    "ConfigError",
    "Draft",
    "EndedRequest",
    "HostStep",
    "KVLayer",
    "LogitsRows",
    "Logprob",
    "OutOfMemoryError",
    "PluginError",
    "Pools",
    "ProcessorError",
    "PromptError",
    "RequestChanges",
    "RequestInfo",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SlotState",
    "SpecdecError",
    "SpeculationMetrics",
    "SpeculativeConfig",
    "Speculator",
    "SpeculatorConfig",
    "SpeculatorError",
    "Step",
    "StepReport",
    "TargetError",
    "TargetInfo",
    "TargetOutputs",
    "Verdict",
    "VerificationRule",
    "hookimpl",
    "row_by_row",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specdec.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
