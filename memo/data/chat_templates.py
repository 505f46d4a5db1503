"""Finds the chat template of a model, of a run, or by name (--chat-template).

Templates by name are for models without one: chatml and llama3 use the special tokens of the models that introduced
these formats; the tokenizer should have them. plain needs no special tokens: each message is a line, and the
end-of-document token follows an answer.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memo.artifacts.model_directory import model_file
from memo.artifacts.reading import Source, read_json_object, read_text
from memo.config import RunConfig
from memo.data.chat_template import ChatTemplate
from memo.data.tokenizer import ByteTokenizer
from memo.errors import ConfigError, DataError

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_SUFFIX = f"-{TEMPLATE_FILE}"
"""The prefix of a corpus of conversations and this suffix name the template that rendered the corpus."""
_LARGEST_BYTES = 1 << 20
"""Limit of a template's file; the largest in use have a hundredth of it."""
_TOKENIZER_CONFIG, _TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
_WITHOUT_TOOLS = r"""{%- if tools or messages | selectattr('tool_calls', 'defined') | list %}
    {{- raise_exception('it has no place for tools') }}
{%- endif %}
"""
_CHATML = r"""{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
_LLAMA3 = r"""{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + (message.content | trim) + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
_PLAIN = r"""{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- 'Assistant: ' }}
        {%- generation %}{{- message.content + (eos_token or '\n') }}{%- endgeneration %}
        {{- '\n' if eos_token }}
    {%- else %}
        {{- (message.role | capitalize) + ': ' + message.content + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant: ' }}
{%- endif %}
"""
CHAT_TEMPLATES = {
    name: _WITHOUT_TOOLS + source for name, source in (("chatml", _CHATML), ("llama3", _LLAMA3), ("plain", _PLAIN))
}
_ACCEPTED = f"one of {', '.join(CHAT_TEMPLATES)}, a file of Jinja, or the directory of a model that has one"


def load_chat_template(
    tokenizer: str | Path,
    special_texts: Sequence[str],
    given: str | Path | None = None,
    flag: str = "--tokenizer",
) -> ChatTemplate:
    """Load the template of a tokenizer's directory (or of the directory of a tokenizer.json), or the `given` template.

    `given`: a name of CHAT_TEMPLATES, a Jinja file, or a directory; the variables still come from `tokenizer`, which
    `flag` gave.

    Raises ConfigError if there is no template, and DataError for a template that cannot be read.
    """
    is_bytes = str(tokenizer) == ByteTokenizer.name  # the byte tokenizer has no folder
    folder = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    config = {} if is_bytes else _read_config(folder)
    found: tuple[str | Path, str] | None
    if given is None:
        found = None if is_bytes else _find(folder, config)
    elif str(given) in CHAT_TEMPLATES:
        found = f"--chat-template {given}", CHAT_TEMPLATES[str(given)]
    elif Path(given).is_dir():
        found = _find(Path(given), _read_config(Path(given)))
    else:
        found = given, _read_text(Path(given))
    if found is None:
        what = f"{flag} {tokenizer} comes" if given is None else f"--chat-template {given} comes"
        raise ConfigError(
            f"{what} without a chat template (neither {TEMPLATE_FILE} nor chat_template in {_TOKENIZER_CONFIG}): give "
            f"--chat-template, {_ACCEPTED}"
        )
    name, source = found
    return ChatTemplate(source, variables=_tokens_in(config), special_texts=special_texts, name=name)


def load_run_template(config: RunConfig, special_texts: Sequence[str], given: str | None = None) -> ChatTemplate:
    """Load the chat template of a run: the `given` one, else the one that rendered its conversations, else the one of
    its pretrained model or tokenizer.

    Raises ConfigError if there is none, and the errors of `load_chat_template`.
    """
    pretrained = config.checkpoint.pretrained_checkpoint
    learned = (f"{prefix}{TEMPLATE_SUFFIX}" for prefix in config.data.prefixes)
    found = given or next(filter(os.path.exists, learned), None)
    source = pretrained or config.data.tokenizer
    if source is None and found is None:
        raise ConfigError(
            "there is no chat template, as the run has learned no conversations and names no model: give "
            "--chat-template, a file of Jinja or the directory of a model that has one"
        )
    return load_chat_template(
        source or ByteTokenizer.name, special_texts, found, "--model" if pretrained else "--tokenizer"
    )


def special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and so on, as the tokenizer's files in a folder spell them. Raises DataError."""
    return _tokens_in(_read_config(folder))


def _find(folder: Path, config: Mapping[str, Any]) -> tuple[str | Path, str] | None:
    """(name, source) of a folder's template, or None; the file takes precedence over the configuration, as in
    transformers."""
    if model_file(folder, TEMPLATE_FILE) is not None:
        return folder / TEMPLATE_FILE, _read_text(folder / TEMPLATE_FILE)
    name = f"chat_template in {folder / _TOKENIZER_CONFIG}"
    value = config.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[-1].get("template") if named else None
    if value is not None and not isinstance(value, str):
        raise DataError(f"{name} is no text; repair it, or give --chat-template")
    return None if value is None else (name, value)


def _read_config(folder: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty if there is no such file. As in transformers, the named tokens of an
    older directory, which does not list its added tokens, are those of special_tokens_map.json."""
    config, named = (
        {} if path is None else read_json_object(path, Source(str(path), DataError, "download it again"))
        for path in (model_file(folder, name) for name in (_TOKENIZER_CONFIG, _TOKENS_MAP))
    )
    return config if "added_tokens_decoder" in config else config | named


def _read_text(path: Path) -> str:
    source = Source(f"--chat-template {path}", ConfigError, f"give {_ACCEPTED}")
    return read_text(path, source, max_bytes=_LARGEST_BYTES)


def _tokens_in(config: Mapping[str, Any]) -> dict[str, str]:
    """{name: text} of the special tokens in tokenizer_config.json, where each is a text or an object with a text."""
    values = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}
