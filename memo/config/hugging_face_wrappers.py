"""Models of text inside larger models, which see images as well: memo trains the text model and keeps the rest.

The config.json of a larger model has that of the text model under `text_config`, and a few keys that hold for both. The
weights of the text model lie beside the others, under names of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wrapper:
    """Facts about one model_type that holds a model of text.

    Attributes:
        architecture: its class in transformers.
        text: the model_type of its text, where text_config does not say so.
        names: the prefix of a text weight's name in the family's own files, and the prefix that replaces it in these
            files. transformers reads all of `NAMINGS`; this is the form of the hub, which an export writes.
        stacked: whether the matrices of all experts lie in one tensor.
    """

    architecture: str
    text: str
    names: tuple[str, str]
    stacked: bool = False


_INNER, _OUTER = ("model.", "model.language_model."), ("", "language_model.")
MODULES = _INNER
"""Prefixes of the modules of a text in transformers 5, the same in any wrapper, whatever its files call the weights: by
module names PEFT finds where an adapter belongs."""
NAMINGS = (("", ""), ("model.", ""), ("transformer.", ""), _INNER, _OUTER)
"""Forms of a weight's name, as `Wrapper.names`: the family's own, those of a model that was saved without its head, and
those of a text in a wrapper."""
WRAPPERS = {
    "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5_text", _INNER),
    "qwen3_5_moe": Wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", _INNER, stacked=True),
    "qwen3_vl": Wrapper("Qwen3VLForConditionalGeneration", "qwen3_vl_text", _INNER),
    "qwen3_vl_moe": Wrapper("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", _INNER),
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", "gemma3_text", _OUTER),
    "gemma4": Wrapper("Gemma4ForConditionalGeneration", "gemma4_text", _INNER),
    "gemma4_unified": Wrapper("Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text", _INNER),
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", "mistral", _OUTER),
}
"""By model_type."""
_SHARED = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
"""Keys of the whole model that hold for the text as well."""


def is_wrapper(content: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a larger model whose text memo can find."""
    return content.get("model_type") in tuple(WRAPPERS) and isinstance(content.get("text_config"), dict)


def text_of(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the model of text; all keys of a file that is no wrapper."""
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
    """A weight's name with its prefix replaced; None if the name does not begin with the prefix."""
    begin, instead = naming
    return instead + name.removeprefix(begin) if name.startswith(begin) else None
