"""From a name, a folder or a module to a transformers causal LM in evaluation mode."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec.errors import ConfigError, TargetError, nearest
from specdec.runner.model_support import check_config, refuse

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HALF = (torch.bfloat16, torch.float16)


def resolve_dtype(dtype: torch.dtype | str) -> torch.dtype | None:
    """Return the dtype named, None for `auto`. Raise ConfigError for anything else."""
    if isinstance(dtype, torch.dtype):
        found: Any = dtype
    elif dtype == "auto":
        return None
    else:
        found = getattr(torch, dtype.removeprefix("torch."), None)
    if found not in (torch.float64, torch.float32, *_HALF):
        known = "auto, bfloat16, float16, float32, float64"
        raise ConfigError(f"dtype {dtype!r} cannot be used; known: {known}")
    assert isinstance(found, torch.dtype)
    return found


def load_config(
    model: str | Path,
    *,
    revision: str | None,
    trust_remote_code: bool,
    token: str | None,
    hf_overrides: dict[str, Any] | None,
) -> PretrainedConfig:
    """Read a configuration and apply the overrides. Raise ConfigError or TargetError."""
    options = {"revision": revision, "trust_remote_code": trust_remote_code, "token": token}
    if os.path.isdir(model) and not os.path.isfile(os.path.join(model, "config.json")):
        raise TargetError(f"folder {str(model)!r} holds no config.json, so no model can be loaded")
    if _looks_like_a_path(model) and not os.path.exists(model):
        raise TargetError(f"no model at {str(model)!r}: there is no such folder")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model, **options)
    except OSError as error:
        raise _unreachable(model, revision, error) from error
    except (ValueError, KeyError) as error:
        raise TargetError(f"cannot read the configuration of {str(model)!r}: {error}") from error
    _override(config, hf_overrides or {}, "")
    _check_causal(config, str(model))
    return config


def load_model(
    model: str | Path,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    revision: str | None,
    trust_remote_code: bool,
    token: str | None,
) -> PreTrainedModel:
    """Read the weights. Without a dtype: the checkpoint's own, but float32 for halves on a CPU."""
    wanted: torch.dtype | str = dtype or config.get_text_config().dtype or config.dtype or "auto"
    if dtype is None and device.type == "cpu" and wanted in _HALF:
        wanted = torch.float32  # half precision is slower than float32 on CPUs
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model,
            config=config,
            dtype=wanted,
            revision=revision,
            trust_remote_code=trust_remote_code,
            token=token,
        )
    except OSError as error:
        raise _unreachable(model, revision, error) from error
    except ValueError as error:
        raise TargetError(f"cannot load {str(model)!r}: {error}") from error
    if dtype is None and device.type == "cpu" and loaded.dtype in _HALF:
        loaded = loaded.float()
    built: PreTrainedModel = loaded.to(device).eval()
    return built


def override_module(model: PreTrainedModel, hf_overrides: dict[str, Any] | None) -> None:
    """Refuse overrides for a module that exists already."""
    if hf_overrides:
        raise ConfigError("hf_overrides cannot change a model that is already built")
    check_config(model.config, type(model).__name__)


def _looks_like_a_path(model: str | Path) -> bool:
    text = str(model)
    return isinstance(model, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1


def _unreachable(model: str | Path, revision: str | None, error: OSError) -> TargetError:
    what = str(model) if revision is None else f"{model} (revision {revision})"
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return TargetError(
        f"cannot load {what!r}: {first} Tried it as a folder, in the local Hub cache and at the "
        "Hugging Face Hub. Without a network, pass the path of a local folder that holds "
        "config.json and the weights."
    )


def _override(config: PretrainedConfig, overrides: dict[str, Any], path: str) -> None:
    for key, value in overrides.items():
        known = {name for name in vars(config) if not name.startswith("_")}
        known |= set(config.attribute_map) | {"rope_scaling"}.intersection(dir(config))
        if key not in known:
            owner = type(config).__name__
            raise ConfigError(
                f"hf_overrides: {owner} has no key {path + key!r}{nearest(key, known)}"
            )
        current = getattr(config, key)
        if isinstance(value, dict) and hasattr(current, "get_text_config"):
            _override(current, value, f"{path}{key}.")
        else:
            setattr(config, key, value)


def _check_causal(config: PretrainedConfig, model: str) -> None:
    """Refuse checkpoints that are not causal LMs, before any weight is read."""
    names: list[str] = getattr(config, "architectures", None) or []
    name = f"{names[0]} ({model})" if names else f"{type(config).__name__} ({model})"
    check_config(config, name)
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return  # the repository's own code says which class it is
    if not names:
        if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return
        raise refuse(name, "its configuration names no architecture and no causal one is known")
    if not set(names).intersection(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise refuse(name, "it is not a causal language model")
