"""Facts about a layer that is not memo's own, as its class tells them to the rest of memo.

The class is a memo.CustomLayer (memo.model.custom), named by --custom-layer as FILE.py:CLASS or MODULE:CLASS. It has
two halves, before and after attention, and tells its facts from one run of both on shapes alone. Parameters, FLOPs,
slots of a swap plan, memory and time of the layer all follow from these facts. This module does not import torch; the
file that defines the class does.
"""

import functools
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memo.config.model import ModelConfig
from memo.errors import ConfigError
from memo.spec.weights import Weight


class TokenBytes(NamedTuple):
    """Bytes as a function of the tokens, before any split: `per_token` bytes for each token, and `fixed` bytes once."""

    per_token: float
    fixed: float

    def of(self, num_tokens: int, tp: int) -> int:
        """Bytes on one rank for `num_tokens` gathered tokens; tp splits either the tokens or the width, in both cases
        by tp."""
        return round((self.per_token * num_tokens + self.fixed) / tp)


class Half(NamedTuple):
    """Bytes of one half of a layer under autograd, besides its inputs.

    Attributes:
        kept: bytes that live from its forward to its backward, with the first half's output, which attention keeps.
        forward: the peak in the forward, output included.
        backward: the peak in the backward beyond `kept`, gradients of the inputs included.
        made: the sum of all tensors that the forward makes.
    """

    kept: TokenBytes
    forward: TokenBytes
    backward: TokenBytes
    made: TokenBytes


@dataclass(frozen=True)
class LayerFacts:
    """Facts about a custom layer that planning needs.

    Attributes:
        weights: its parameters, in the order in which it makes them.
        recalled: name and width of the output of each column-parallel matrix of the second half. A share of its tokens
            may move to host memory; the rest is computed again in backward.
        halves: for each width of an element (2, 4, 8 bytes), on CPUs and on GPUs: the half before attention and the
            half after it.
    """

    weights: tuple[Weight, ...]
    recalled: tuple[tuple[str, int], ...]
    halves: tuple[tuple[tuple[int, bool], tuple[Half, Half]], ...]

    def bytes_of(self, narrow: int, on_gpu: bool) -> tuple[Half, Half]:
        """Both halves in a dtype of `narrow` bytes."""
        return dict(self.halves)[narrow, on_gpu]

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that tell layers with different facts apart."""
        return _digest(repr(self))


@functools.lru_cache(maxsize=64)
def custom_facts(model: ModelConfig) -> LayerFacts:
    """The facts of a model's custom layer. Raises ConfigError for a name that cannot be loaded, and for a class that is
    no layer."""
    facts: LayerFacts = load_layer(model.custom_layer).facts(model)
    return facts


def check_split(model: ModelConfig, tp: int) -> None:
    """Raises ConfigError if tp does not divide the matrices of a custom layer."""
    if not model.custom_layer:
        return
    for weight in custom_facts(model).weights:
        sizes = {"rows": weight.parts, "columns": ((weight.name, weight.columns or 1),)}.get(weight.split, ())
        for name, size in sizes:
            if size % tp:
                raise ConfigError(
                    f"--custom-layer {model.custom_layer}: {name} has {size} {weight.split}, which do not divide by "
                    f"--tp {tp}: use a --tp that divides {size}, or change the size"
                )


def layer_name(layer: type) -> str:
    """FILE.py:CLASS or MODULE:CLASS of a class, by which every process of a run finds it.

    Raises ConfigError for a class inside of a function or class, for one with the name of an earlier class of this
    process, as the facts of that class are cached by the name, and for one that is no layer.
    """
    file = getattr(sys.modules.get(layer.__module__), "__file__", None) if layer.__module__ == "__main__" else None
    place = str(Path(file).resolve()) if file is not None and file.endswith(".py") else layer.__module__
    name = f"{place}:{layer.__qualname__}"
    if not layer.__qualname__.isidentifier():
        raise _error(name, "is a class inside of a function or a class", "define it at the top of a file or notebook")
    if load_layer(name) is not layer:
        raise _error(name, "is another class than the one given", "give each a name of its own, or start Python again")
    return name


@functools.lru_cache(maxsize=64)
def load_layer(name: str) -> Any:
    """The class that FILE.py:CLASS or MODULE:CLASS names; a file runs once in a process. Raises ConfigError."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise _error(name, "is not of the form FILE.py:CLASS or MODULE:CLASS", "give both, such as layers.py:MyLayer")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # the file may do anything
        hint = "give the path of a file that is there, or a module that Python finds (PYTHONPATH)"
        raise _error(name, f"cannot be loaded ({type(error).__name__}: {error})", hint) from error
    found = getattr(module, attribute, None)
    if not callable(getattr(found, "facts", None)):
        what = f"has no class {attribute}" if found is None else f"names {attribute}, which is no memo.CustomLayer"
        raise _error(name, what, "name a class that derives from memo.CustomLayer")
    return found


def _digest(text: str) -> str:
    import hashlib  # whose OpenSSL most commands can do without

    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _from_file(path: Path) -> Any:
    path = path.resolve()
    running = getattr(sys.modules.get("__main__"), "__file__", None)
    if running is not None and Path(running).resolve() == path:
        return sys.modules["__main__"]  # a script that names a class of its own
    name = f"memo_custom_layer_{_digest(str(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _error(name: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"--custom-layer {name} {problem}: {remedy}")
