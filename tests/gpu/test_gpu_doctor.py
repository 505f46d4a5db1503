"""`memo doctor` on a machine with GPUs: the driver's answers and torch's meet."""

import json

import pytest
import torch

from memo.cli.main import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_it_sees_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    count = torch.cuda.device_count()
    assert found["CUDA"]["state"] != "STOPS" and f"{count} of " in found["CUDA"]["found"]
    assert f"{torch.version.cuda}, driver " in found["CUDA"]["found"]
    assert f"{torch.cuda.get_device_name(0)} x " in found["GPUs"]["found"]
