"""Tokenizers, chat templates in three public styles, and conversations, in the form of Hugging Face directories."""

import json
from pathlib import Path
from typing import Any

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|begin|>", "<|start_header|>", "<|end_header|>", "<|eot|>"),
    *("<s>", "</s>"),
)

# « and » stand where a template may mark the text of the assistant.
_STYLES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{% if m['role'] == 'assistant' %}«{{ m['content'] + '<|im_end|>' }}»{{ '\\n' }}"
        "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "headers": """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('no role ' + m.role) }}
    {%- endif %}
    {{- '<|start_header|>' + m.role + '<|end_header|>\\n\\n' }}
    {%- if m.role == 'assistant' %}
        {%- if true -%}«{{- m.content | trim + '<|eot|>' -}}»{%- endif %}
    {%- else %}
        {{- m.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header|>assistant<|end_header|>\\n\\n' }}
{%- endif %}
""",
    "inst": (
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m['role'] == 'system' %}{% set ns.system = m['content'] + '\\n\\n' %}{% continue %}"
        "{% elif m['role'] == 'user' %}{{ '[INST] ' + ns.system + m['content'] + ' [/INST]' }}{% set ns.system = '' %}"
        "{% elif m['role'] == 'assistant' %}«{{ ' ' + m['content'] + eos_token }}»"
        "{% else %}{{ raise_exception('only system, user and assistant') }}{% endif %}{% endfor %}"
    ),
}
STYLES = tuple(_STYLES)
_VARIABLES = {
    "chatml": {"bos_token": None, "eos_token": "<|im_end|>"},
    "headers": {"bos_token": {"content": "<|begin|>", "__type": "AddedToken"}, "eos_token": "<|eot|>"},
    "inst": {"bos_token": "<s>", "eos_token": "</s>"},
}

CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there!"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Größe? 日本"},
        {"role": "assistant", "content": "naïve 🦙🦙"},
        {"role": "user", "content": "again\n\nplease"},
        {"role": "assistant", "content": "one\ntwo"},
    ],
    [
        {"role": "user", "content": "assistant\nassistant"},
        {"role": "assistant", "content": "assistant"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "7 * 6 = 42"},
    ],
)


def template(style: str, *, marks: bool) -> str:
    """The chat template of a style; with or without the marks of generation."""
    begin, end = ("{% generation %}", "{% endgeneration %}") if marks else ("", "")
    return _STYLES[style].replace("«", begin).replace("»", end)


def answers(style: str, chat: list[dict[str, str]]) -> list[str]:
    """Return the texts of the assistant in a style, up to the token that ends each text."""
    texts = [message["content"] for message in chat if message["role"] == "assistant"]
    return {
        "chatml": [f"{text}<|im_end|>" for text in texts],
        "headers": [f"{text}<|eot|>" for text in texts],
        "inst": [f" {text}</s>" for text in texts],
    }[style]


def write_tokenizer(folder: Path, style: str, *, marks: bool, trim_offsets: bool = False) -> Path:
    """Write tokenizer.json and tokenizer_config.json with a chat template; return `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if trim_offsets:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=300 + len(SPECIAL),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([message["content"] for chat in CHATS for message in chat], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **_VARIABLES[style]}
    config["chat_template"] = template(style, marks=marks)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_llama(folder: Path, max_positions: int = 256) -> Path:
    """Write a tiny Llama with random weights and a chatml tokenizer of a base model; return `folder`.

    The end of text of a base model ends documents, and not answers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder, "chatml", marks=False)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_lines(path: Path, records: list[Any]) -> Path:
    """Write a .jsonl file; strings are written as they are."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_chats(path: Path) -> Path:
    """Write CHATS in OpenAI's form."""
    return write_lines(path, [{"messages": chat} for chat in CHATS])
