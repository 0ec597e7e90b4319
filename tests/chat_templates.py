"""Small chat templates, one for each habit of published ones: what they refuse, leave out, and read under which name.

None is a copy; each says whose manners it has.
"""

from __future__ import annotations

ONLY_NEWEST_THOUGHTS = """\
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor -%}
"""

# MiniMax-M2: a system turn comes first or is lost, and so is a developer's; tools are functions in an envelope.
MINIMAX = (
    ONLY_NEWEST_THOUGHTS
    + """\
{%- if messages[0].role == 'system' %}]system {{ messages[0].content }}{% else %}]system Be helpful.{% endif %}
{%- for tool in tools or [] %}<tool>{{ tool.function | tojson }}</tool>{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}]user {{ m.content }}
{%- elif m.role == 'assistant' %}]ai
{%- if m.reasoning_content and loop.index0 > ns.asked %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}<invoke {{ call.function.name }}>
{%- for name, value in call.function.arguments.items() %}<{{ name }}>{{ value if value is string else value | tojson }}
{%- endfor %}{% endfor %}
{%- elif m.role == 'tool' %}]tool {{ m.content }}{% endif %}[end]
{%- endfor %}"""
)

# GLM-4.x: keeps thoughts that stand in the text, too; a developer's turn is lost.
GLM = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in m.content %}{% set thought = m.content.split('</think>')[0].split('<think>')[-1] %}
{%- else %}{% set thought = '' %}{% endif %}<think>{{ thought }}</think>
{{- m.content.split('</think>')[-1].strip() }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %}<arg>{{ name }}</arg>{{ value | tojson }}{% endfor %}
{%- endfor %}
{%- elif m.role == 'tool' %}<|observation|>{{ m.content }}
{%- elif m.role == 'system' %}<|system|>{{ m.content }}{% endif %}
{%- endfor %}"""

# Qwen3: arguments in either form, only the newest thoughts, nothing for a developer.
QWEN3 = (
    ONLY_NEWEST_THOUGHTS
    + """\
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>
{%- elif m.role == 'assistant' %}<|im_start|>assistant
{%- if m.reasoning_content and loop.index0 > ns.asked %}<think>{{ m.reasoning_content.strip() }}</think>{% endif %}
{{- m.content.lstrip() }}
{%- for call in m.tool_calls or [] %}{% set f = call.function or call %}<tool_call>{"name": "{{ f.name }}", "arguments":
{{- f.arguments if f.arguments is string else f.arguments | tojson }}}{% endfor %}<|im_end|>
{%- elif m.role == 'tool' %}<|im_start|>user<tool_response>{{ m.content }}</tool_response><|im_end|>{% endif %}
{%- endfor %}"""
)

# Qwen3-Coder: never thinks; refuses a system turn that is not the first, and roles that it does not know.
QWEN_CODER = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be first.') }}{% endif %}
{%- if m.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('Unexpected role.') }}{% endif %}
<|im_start|>{{ m.role }} {{ m.content | trim }}
{%- for call in m.tool_calls or [] %}<function={{ call.function.name }}>
{%- for name, value in call.function.arguments | items %}<parameter={{ name }}>{{ value | string }}{% endfor %}
{%- endfor %}<|im_end|>
{%- endfor %}"""

# DeepSeek-V3.1: joins arguments as text, gathers system turns at the beginning, drops thoughts.
DEEPSEEK = """\
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|User|>{{ m.content }}
{%- elif m.role == 'assistant' %}<|Assistant|></think>{{ m.content.split('</think>', 1)[-1] }}
{%- for call in m.tool_calls or [] %}
{{- '<call>' + call['function']['name'] + '<sep>' + call['function']['arguments'] }}{% endfor %}<|end|>
{%- elif m.role == 'tool' %}<output>{{ m.content }}{% endif %}
{%- endfor %}"""

# The first DeepSeek-V3 and R1: calls only where the content is null, and then nothing else; arguments as text.
DEEPSEEK_FIRST = """\
{%- for m in messages %}
{%- if m.role == 'user' %}<|User|>{{ m.content }}
{%- elif m.role == 'assistant' and m['content'] is none %}
{%- for call in m.tool_calls %}<|Assistant|><call>{{ call.type + '<sep>' + call.function.name }}
{{ call.function.arguments + '<call end>' }}{% endfor %}
{%- elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] + '<|end|>' }}
{%- elif m.role == 'tool' %}<output>{{ m.content }}<output end>{% endif %}
{%- endfor %}"""

# Hermes 3: words or calls, by whether there is a list of calls.
HERMES = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.tool_calls is not defined %} {{ m.content }}
{%- else %}{% for call in m.tool_calls %}<tool_call>
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}
{%- endif %}<|im_end|>
{%- endfor %}"""

# Mistral: ids of nine characters; turns without calls and results alternate; words beside calls are lost.
MISTRAL = """\
{%- set ns = namespace(at=0) -%}
{%- for m in messages if m.role != 'tool' and m.tool_calls is not defined %}
{%- if (m.role == 'user') != (ns.at % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.at = ns.at + 1 %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST] {{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}[TOOL_CALLS]
{%- for call in m.tool_calls %}{{ call.function | tojson }}{{ call.id }}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}{% endfor %}</s>
{%- elif m.role == 'assistant' %} {{ m.content }}</s>
{%- else %}[TOOL_RESULTS] {{ m.content }} {{ m.tool_call_id }}[/TOOL_RESULTS]{% endif %}
{%- endfor %}"""

# As gpt-oss with several calls at once: the first is written, and nothing said of the others.
FIRST_CALL = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- if m.tool_calls %}<|call|>{{ m.tool_calls[0].function | tojson }}{% endif %}
{%- endfor %}"""

# Kimi-K2: writes a call's id and not its name; the id names the function.
KIMI = """\
{%- for m in messages %}<|im_{{ m.role }}|>
{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{% endif %}
{%- if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<begin>{{ call.id }}<argument>
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}{% endfor %}
{%- endfor %}"""

# Mixtral: user and assistant alternate, nothing else.
MIXTRAL = """\
{{ bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- elif m.role == 'assistant' %}{{ m.content }}</s>
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

# Llama: BOS and today's date; one call in a turn.
LLAMA = """\
{{ bos_token }}<|header|>system Today Date: {{ strftime_now('%d %b %Y') }}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|header|>ipython {{ m.content | tojson }}
{%- else %}<|header|>{{ m.role }} {{ m.content | trim }}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls at once!') }}{% endif %}
{{- {'name': m.tool_calls[0].function.name, 'parameters': m.tool_calls[0].function.arguments} | tojson }}{% endif %}
{%- endif %}<|eot|>
{%- endfor %}"""

# gpt-oss: thoughts are `thinking`, and not beside both a text and a call; a result follows the call it names.
GPT_OSS = """\
{%- set ns = namespace(called=none) -%}
<|start|>system The date is {{ strftime_now('%Y-%m-%d') }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.tool_calls and m.content and m.thinking %}{{ raise_exception('content and thinking beside calls') }}{% endif %}
{%- if m.thinking %}<|analysis|>{{ m.thinking }}{% endif %}
{%- for call in m.tool_calls or [] %}{% set ns.called = call.function.name %}
<|to|>functions.{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}<|final|>{{ m.content }}
{%- elif m.role == 'tool' %}
{%- if not ns.called %}{{ raise_exception('a tool role without a call before it') }}{% endif %}
<|start|>functions.{{ ns.called }} {{ m.content | tojson }}
{%- else %}<|start|>{{ m.role }} {{ m.content }}{% endif %}
{%- endfor %}"""

TEMPLATES: dict[str, str | None] = {
    "minimax": MINIMAX,
    "glm": GLM,
    "qwen3": QWEN3,
    "qwen-coder": QWEN_CODER,
    "deepseek": DEEPSEEK,
    "deepseek-first": DEEPSEEK_FIRST,
    "hermes": HERMES,
    "mistral": MISTRAL,
    "first-call": FIRST_CALL,
    "kimi": KIMI,
    "mixtral": MIXTRAL,
    "llama": LLAMA,
    "gpt-oss": GPT_OSS,
    "none": None,
}
