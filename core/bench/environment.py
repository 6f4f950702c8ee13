"""What a measurement was made on: belongs to every result."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from specdec import __version__

_PACKAGES = ("torch", "transformers", "numpy", "triton")
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, processor, threads, and how busy the machine is."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(device),
        "device_name": device_name(device),
        "cpu": _processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "platform": platform.platform(),
        "python": platform.python_version(),
        "specdec-core": __version__,
        **{name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
    }


def device_name(device: torch.device) -> str:
    """The product's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
