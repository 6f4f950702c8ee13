"""What a measurement was made on: belongs to every result."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from specdec.bench.environment import device_name

PACKAGES = ("specdec-core", "torch", "transformers", "triton", "numpy")


def environment() -> dict[str, Any]:
    """Device, threads, versions and commit."""
    return {
        "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    root = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"
