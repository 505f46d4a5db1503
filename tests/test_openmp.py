"""Threads of torch's OpenMP sleep while they wait, on a machine without a GPU, whichever program of memo starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRAINS = ("train", "--mock-data", "--train-iters", "1", "--seq-len", "64", "--no-progress")


def shown(*command: str, **environment: str) -> str:
    """What OpenMP says of its settings, once it is loaded, of a process that has been told no policy but this."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        check=False,
        capture_output=True,
        text=True,
        env=inherited | environment,
        timeout=600,
    )
    assert "OPENMP DISPLAY ENVIRONMENT BEGIN" in done.stderr, done.stderr
    return done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="torch's OpenMP is GNU's on Linux")
@pytest.mark.parametrize(
    "command",
    [
        ("-c", "import memo.model.norm"),
        ("-c", "import memo; memo.Trainer"),
        ("-m", "memo", *TRAINS),
        (f"{ROOT}/examples/pretrain_gpt.py", *TRAINS[1:]),
        (f"{ROOT}/examples/custom_model.py", "--help"),  # help of all other programs needs no torch
    ],
    ids=["layers", "package", "command", "example", "custom_model"],
)
def test_threads_wait_passively(command: tuple[str, ...]) -> None:
    assert "GOMP_SPINCOUNT = '0'" in shown(*command), "the policy is called PASSIVE by default, and threads spin"


@pytest.mark.skipif(sys.platform != "linux", reason="torch's OpenMP is GNU's on Linux")
def test_what_the_user_has_set_stays() -> None:
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in shown("-c", "import memo; memo.Trainer", OMP_WAIT_POLICY="ACTIVE")


@pytest.mark.parametrize(("has_gpu", "policy"), [(False, "PASSIVE"), (True, None)])
def test_only_where_there_is_no_gpu(has_gpu: bool, policy: str | None) -> None:
    code = (
        "import os\nos.environ.pop('OMP_WAIT_POLICY', None)\n"
        f"os.path.exists = lambda path: path == '/dev/nvidiactl' and {has_gpu}\n"
        f"import memo\nassert os.environ.get('OMP_WAIT_POLICY') == {policy!r}"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
