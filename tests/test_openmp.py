"""Threads of torch's OpenMP sleep while they wait, on a machine without a GPU, whichever program of memo starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRAINS = ("train", "--mock-data", "--train-iters", "1", "--seq-len", "64", "--no-progress")


STAND_IN = "import os\nprint('at the import of torch:', os.environ.get('OMP_WAIT_POLICY'), flush=True)\nos._exit(0)\n"
"""In torch's place: OpenMP reads its settings when torch loads it."""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that has been told no policy but this."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment = {"WORLD_SIZE": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, *command],
        check=False,
        capture_output=True,
        text=True,
        env=inherited | environment,
        timeout=600,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="torch's OpenMP is GNU's on Linux")
def test_threads_wait_passively() -> None:
    told = run("-c", "import memo.model.norm", OMP_DISPLAY_ENV="VERBOSE").stderr
    assert "GOMP_SPINCOUNT = '0'" in told, "the policy is called PASSIVE by default, and threads spin"


@pytest.mark.skipif(sys.platform != "linux", reason="torch's OpenMP is GNU's on Linux")
@pytest.mark.parametrize(
    "command",
    [
        ("-c", "import memo; memo.Trainer"),
        ("-m", "memo", *TRAINS),
        (f"{ROOT}/examples/pretrain_gpt.py", *TRAINS[1:]),
        (f"{ROOT}/examples/custom_model.py", "--help"),  # help of all other programs needs no torch
    ],
    ids=["package", "command", "example", "custom_model"],
)
@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_every_program_says_so_before_torch_is_loaded_and_what_the_user_has_set_stays(
    command: tuple[str, ...], given: str | None, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(STAND_IN)
    environment = {} if given is None else {"OMP_WAIT_POLICY": given}
    done = run(*command, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", **environment)
    assert done.stdout == f"at the import of torch: {given or 'PASSIVE'}\n", done.stderr


@pytest.mark.parametrize(("has_gpu", "policy"), [(False, "PASSIVE"), (True, None)])
def test_only_where_there_is_no_gpu(has_gpu: bool, policy: str | None) -> None:
    code = (
        "import os\nos.environ.pop('OMP_WAIT_POLICY', None)\n"
        f"os.path.exists = lambda path: path == '/dev/nvidiactl' and {has_gpu}\n"
        f"import memo\nassert os.environ.get('OMP_WAIT_POLICY') == {policy!r}"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
