"""Models of text that lie in larger ones, which see images as well: memo trains the text, and the rest goes along.

A config.json of such a model has that of the text under `text_config`, and beside it a few keys that hold for both. Its
weights lie beside those of the rest, under names of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wrapper:
    """What memo has to know of one model_type that holds a model of text.

    Attributes:
        architecture: its class in transformers.
        text: the model_type of its text, where text_config does not say so.
        names: how its files call the text's weights: what begins a name in the family's own files, and what stands
            there instead. transformers reads all of `NAMINGS`; this is the form of the hub, which an export takes.
        stacked: whether the matrices of all experts lie in one tensor.
    """

    architecture: str
    text: str
    names: tuple[str, str]
    stacked: bool = False


_INNER, _OUTER = ("model.", "model.language_model."), ("", "language_model.")
MODULES = _INNER
"""How transformers 5 calls the modules of a text in any wrapper, whatever its files call the weights: by these PEFT
finds where an adapter belongs."""
NAMINGS = (("", ""), ("model.", ""), ("transformer.", ""), _INNER, _OUTER)
"""Forms of a weight's name, as `Wrapper.names`: the family's, those of a model that was saved without its head, and
those of a text in a wrapper."""
WRAPPERS = {
    "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5_text", _INNER),
    "qwen3_5_moe": Wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", _INNER, stacked=True),
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", "gemma3_text", _OUTER),
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", "mistral", _OUTER),
}
"""By model_type."""
_SHARED = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
"""Keys that hold for the text as well where the whole model states them."""


def is_wrapper(content: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model whose text memo knows how to find."""
    return content.get("model_type") in tuple(WRAPPERS) and isinstance(content.get("text_config"), dict)


def text_of(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the model of text: all of them where nothing lies around it."""
    if not is_wrapper(content):
        return content
    shared = {key: content[key] for key in _SHARED if key in content}
    return {"model_type": WRAPPERS[content["model_type"]].text, **content["text_config"], **shared}


def in_wrapper(text: Mapping[str, Any], wrapper: Mapping[str, Any]) -> dict[str, Any]:
    """`wrapper`, the content of a config.json, with this text in it."""
    shared = {key: text[key] for key in _SHARED if key in text}
    own = set(wrapper["text_config"])
    inner = {key: value for key, value in text.items() if key in own or key not in (*_SHARED, "architectures")}
    rest = {key: value for key, value in wrapper.items() if key not in _SHARED}
    return {"architectures": [WRAPPERS[wrapper["model_type"]].architecture], **rest, **shared, "text_config": inner}


def renamed(name: str, naming: tuple[str, str]) -> str | None:
    """A weight's name in another form; None where it has none."""
    begin, instead = naming
    return instead + name.removeprefix(begin) if name.startswith(begin) else None
