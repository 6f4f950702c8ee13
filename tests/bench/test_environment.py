"""What a measurement was made on."""

from __future__ import annotations

import json

import torch

from specdec import __version__
from specdec.bench.environment import environment


def test_it_names_versions_and_the_machine_and_is_json() -> None:
    found = json.loads(json.dumps(environment(torch.device("cpu"))))
    assert found["specdec-core"] == __version__
    assert torch.__version__.startswith(found["torch"])
    assert found["device"] == "cpu"
    assert found["device_name"] == found["cpu"]
    assert found["threads"] == torch.get_num_threads()
    assert found["transformers"]
