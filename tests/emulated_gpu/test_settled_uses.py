"""A planned block that another stream has used waits for that stream when its address is given on, unless its owner
has waited already: then an event would stand for later work of that stream, too."""

import json
import subprocess
import sys
from pathlib import Path

from memo.emulated_gpu.face import EmulatedGpu


def test_only_uses_that_nobody_waited_for_are_waited_for(gpu: EmulatedGpu) -> None:
    program = Path(__file__).with_name("planned_uses.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "waits": {
            "one use": 1,
            "one use, settled": 0,
            "two uses, one settled": 1,
            "two uses, both settled": 0,
            "one use, settled by another stream": 1,
            "no use, settled": 0,
        },
        "races": [],
    }
