"""Chat templates by name (--chat-template), for models without a template.

chatml and llama3 use the special tokens of the models that introduced these formats; the tokenizer should have them.
plain needs no special tokens: each message is a line, and the end-of-document token follows an answer.
"""

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
