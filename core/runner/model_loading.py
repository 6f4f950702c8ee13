"""From a name, a folder or a module to a transformers causal LM in evaluation mode."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec._answers import same_device
from specdec._structure import shown
from specdec.errors import ConfigError, SpecdecError, TargetError, nearest
from specdec.runner.model_support import check_config, refuse, rope_types

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HALF = (torch.bfloat16, torch.float16)
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_LONGEST_REASON = 400  # characters of an error of transformers or torch that are shown
_NAMED = 3  # tensors of a kind that an error names


def resolve_dtype(dtype: object) -> torch.dtype | None:
    """Return the dtype named, None for `auto` and None. Raise ConfigError for anything else."""
    found: Any = dtype
    if dtype is None or dtype == "auto":
        return None
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), None)
    if found not in (torch.float64, torch.float32, *_HALF):
        known = "auto, bfloat16, float16, float32, float64"
        raise ConfigError(f"dtype {dtype!r} cannot be used; known: {known}")
    assert isinstance(found, torch.dtype)
    return found


def resolve_device(device: torch.device | str | None) -> torch.device | None:
    """Return the device named, None for None. Raise ConfigError for anything else."""
    try:
        found = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device is {device!r}, but it has to be 'cpu', 'cuda', 'cuda:N' or a torch device"
        ) from error
    return found


def check_device(device: torch.device) -> None:
    """Raise ConfigError for a device that is not here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"device is {str(device)!r}, but torch finds {count} CUDA devices here")


def load_config(
    model: str | Path,
    *,
    revision: str | None,
    trust_remote_code: bool,
    token: str | bool | None,
    hf_overrides: dict[str, Any] | None,
) -> PretrainedConfig:
    """Read a configuration and apply the overrides. Raise ConfigError or TargetError."""
    options = {"revision": revision, "trust_remote_code": trust_remote_code, "token": token}
    if os.path.isdir(model) and not os.path.isfile(os.path.join(model, "config.json")):
        raise TargetError(f"folder {str(model)!r} holds no config.json, so no model can be loaded")
    if _looks_like_a_path(model) and not os.path.exists(model):
        raise TargetError(f"no model at {str(model)!r}: there is no such folder")
    if not isinstance(hf_overrides, Mapping | None):
        raise ConfigError(
            f"hf_overrides is of type {type(hf_overrides).__name__}; give a dict of keys of the "
            "model's configuration"
        )
    for name in ("config.json", "generation_config.json", *_INDEXES):
        _check_json(Path(model, name))
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model, **options)
    except OSError as error:
        raise _unreachable(model, revision, error) from error
    except Exception as error:  # a file can hold anything
        raise TargetError(
            f"cannot read the configuration of {str(model)!r}: {reason(error)}"
        ) from error
    _override(config, hf_overrides or {}, "")
    try:
        _check_causal(config, str(model))
    except SpecdecError:
        raise
    except Exception as error:  # a value of a type that nobody expects there
        raise _failed(model, error, config, hf_overrides) from error
    return config


def load_model(
    model: str | Path,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    revision: str | None,
    trust_remote_code: bool,
    token: str | bool | None,
    hf_overrides: dict[str, Any] | None,
) -> PreTrainedModel:
    """Read the weights. Without a dtype: the checkpoint's own, but float32 for halves on a CPU.

    hf_overrides: what `load_config` applied, to be named where it is to blame.

    Raise ConfigError or TargetError, also if a tensor is missing, left over or of another shape.
    """
    wanted: torch.dtype | str = dtype or config.get_text_config().dtype or config.dtype or "auto"
    if dtype is None and device.type == "cpu" and wanted in _HALF:
        wanted = torch.float32  # half precision is slower than float32 on CPUs
    try:
        with _report_held():
            answer: Any = AutoModelForCausalLM.from_pretrained(
                model,
                config=config,
                dtype=wanted,
                revision=revision,
                trust_remote_code=trust_remote_code,
                token=token,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are listed instead, and refused below
            )
    except OSError as error:
        raise _unreachable(model, revision, error) from error
    except Exception as error:  # transformers, torch and safetensors raise many kinds
        raise _failed(model, error, config, hf_overrides) from error
    loaded, found = answer
    _check_weights(model, loaded, found, hf_overrides)
    if dtype is None and device.type == "cpu" and loaded.dtype in _HALF:
        loaded = loaded.float()
    try:
        built: PreTrainedModel = loaded.to(device).eval()
    except Exception as error:  # no such device, or no room on it
        raise ConfigError(
            f"device is {str(device)!r}, but the model cannot be moved there: {reason(error)}"
        ) from error
    return built


def check_module(
    model: PreTrainedModel,
    *,
    dtype: torch.dtype | None,
    device: torch.device | None,
    hf_overrides: dict[str, Any] | None,
) -> None:
    """Refuse settings that would change a module that exists already. None asks for nothing."""
    if hf_overrides:
        raise ConfigError("hf_overrides cannot change a model that is already built")
    check_config(model.config, type(model).__name__)
    elsewhere = device is not None and not same_device(device, model.device)
    if elsewhere or dtype not in (None, model.dtype):
        asked = {"dtype": dtype, "device": device}
        wanted = ", ".join(f"{k}={str(v)!r}" for k, v in asked.items() if v is not None)
        raise ConfigError(
            f"the model passed in is {model.dtype} on {model.device}; convert it before instead "
            f"of asking for {wanted}"
        )


def _looks_like_a_path(model: str | Path) -> bool:
    text = str(model)
    return isinstance(model, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1


def reason(error: Exception, config: PretrainedConfig | None = None) -> str:
    """Say in one line what transformers, torch or safetensors raised."""
    if isinstance(error, pickle.UnpicklingError):
        return (
            "its weights are pickled and hold more than tensors, or are no pickle at all; only "
            "tensors are read, as anything else could run code; convert them to safetensors"
        )
    if isinstance(error, KeyError) and config is not None:
        # a name that transformers looked up and does not have; the error holds nothing else
        for key, value in vars(config.get_text_config()).items():
            if error.args[0] in (*rope_types(value), value):
                return f"{key} names {error.args[0]!r}, which transformers does not know"
    text = " ".join(str(error).split())
    if len(text) > _LONGEST_REASON:
        text = text[:_LONGEST_REASON] + "..."
    if text and isinstance(error, OSError | ValueError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _failed(
    model: str | Path,
    error: Exception,
    config: PretrainedConfig,
    hf_overrides: Mapping[str, Any] | None,
) -> ConfigError | TargetError:
    """Say that a model cannot be built or read; overrides are not to blame for broken files."""
    broken = isinstance(error, SafetensorError | pickle.UnpicklingError | MemoryError)
    why = reason(error, config)
    if hf_overrides and not broken:
        return ConfigError(
            f"with hf_overrides={shown(hf_overrides)}, {str(model)!r} cannot be loaded: {why}"
        )
    return TargetError(f"cannot load {str(model)!r}: {why}")


def _check_json(path: Path) -> None:
    """Refuse a file that is there but holds no JSON object: transformers blames other things."""
    if not os.path.isfile(path):  # which takes any text, as a Hub id may be
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TargetError(f"{path} cannot be read as JSON: {reason(error)}") from error
    if not isinstance(found, dict):
        raise TargetError(f"{path} holds no JSON object")


@contextmanager
def _report_held() -> Iterator[None]:
    """Keep back transformers' own table of what does not fit, unless an error refers to it."""
    held: list[logging.LogRecord] = []

    def passes(record: logging.LogRecord) -> bool:
        if "LOAD REPORT" not in record.getMessage():
            return True
        held.append(record)
        return False

    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(passes)
    try:
        yield
    except BaseException:
        log.removeFilter(passes)
        for record in held:
            log.handle(record)
        raise
    finally:
        log.removeFilter(passes)


def _check_weights(
    model: str | Path,
    loaded: PreTrainedModel,
    found: Mapping[str, Any],
    hf_overrides: Mapping[str, Any] | None,
) -> None:
    """Refuse weights that are not exactly those of the model: what is missing would be random.

    found: transformers' account, without what is tied or left out on purpose.
    """
    unused = (name for name in found["unexpected_keys"] if not _predicts_ahead(name, loaded.config))
    shapes = (
        f"{name} is {list(has)} and not {list(needs)}"
        for name, has, needs in found["mismatched_keys"]
    )
    kinds = {
        "missing": sorted(found["missing_keys"]),
        "unused": sorted(unused),
        "of another shape": sorted(shapes),
    }
    problems = [f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds.items() if names]
    if not problems:
        return
    said = (
        f"the tensors of {str(model)!r} are not those of {type(loaded).__name__} as it is "
        f"configured: {', '.join(problems)}"
    )
    if hf_overrides:
        raise ConfigError(f"with hf_overrides={shown(hf_overrides)}, {said}")
    raise TargetError(said)


def _predicts_ahead(name: str, config: PretrainedConfig) -> bool:
    """Whether a tensor is of a multi-token-prediction layer, which come after the model's own."""
    text = config.get_text_config()
    count = getattr(text, "num_nextn_predict_layers", None)
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    if layer is None or not isinstance(count, int):
        return False
    return 0 <= int(layer[1]) - int(text.num_hidden_layers) < count


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _unreachable(model: str | Path, revision: str | None, error: OSError) -> TargetError:
    what = str(model) if revision is None else f"{model} (revision {revision})"
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if os.path.isdir(model):
        return TargetError(f"cannot load {what!r}: {first}")
    return TargetError(
        f"cannot load {what!r}: {first} Tried it as a folder, in the local Hub cache and at the "
        "Hugging Face Hub. Without a network, pass the path of a local folder that holds "
        "config.json and the weights; HF_HUB_OFFLINE=1 skips the retries."
    )


def _override(config: PretrainedConfig, overrides: Mapping[str, Any], path: str) -> None:
    for key, value in overrides.items():
        if not isinstance(key, str):
            raise ConfigError(f"hf_overrides has the key {shown(key)}, but keys have to be text")
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
            continue
        try:
            setattr(config, key, value)
        except Exception as error:  # configurations check themselves
            raise ConfigError(
                f"hf_overrides: {path + key} cannot be {shown(value)}: {reason(error)}"
            ) from error


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
