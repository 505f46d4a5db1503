"""A planned block that another stream has used waits for that stream when its address is given on, unless its owner
has waited already: then an event would stand for later work of that stream, too."""

import json
from pathlib import Path

import own_process


def test_only_uses_that_nobody_waited_for_are_waited_for(tmp_path: Path) -> None:
    done = own_process.run(tmp_path, Path(__file__).with_name("planned_uses.py"), None)
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
