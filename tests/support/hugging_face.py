"""What tests beside packages of Hugging Face need: these packages, and numbers in fp64 throughout."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test if a package is missing. No package is imported: ranks import this mark, and peft takes seconds."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


class Wide(TorchFunctionMode):
    """Let every explicit request for fp32 give fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func is torch.Tensor.div and not args[0].is_floating_point():  # gives fp32
            args = (args[0].double(), *args[1:])
        kwargs = {key: widen(value) for key, value in (kwargs or {}).items()}
        return func(*(widen(value) for value in args), **kwargs)
