import datetime

import pytest

from polyturn.errors import ModelError
from polyturn.rendering import ChatTemplate
from unit.rendering.families import template_source

HELLO = [{"role": "user", "content": "<a> & 'ü'"}]
LINES = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def conversation(*roles):
    return [{"role": role, "content": str(position)} for position, role in enumerate(roles)]


def test_json_is_not_escaped_for_html_and_takes_the_usual_arguments():
    source = "{{ messages[0].content | tojson }} {{ {'b': 1, 'a': 'ü'} | tojson(indent=1, sort_keys=true, ensure_ascii=true) }}"
    assert ChatTemplate(source).render(HELLO, False) == '"<a> & \'ü\'" {\n "a": "\\u00fc",\n "b": 1\n}'


def test_the_date_stands_still():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", today=datetime.datetime(2026, 2, 28, 23, 59))
    assert template.render(HELLO, False) == "28 Feb 2026"


def test_loop_controls_generation_tags_and_block_trimming():
    source = """\
{% for m in messages %}
    {% if loop.index > 1 %}{% break %}{% endif %}
    {% generation %}
{{ m.content }}{% endgeneration %}
{% endfor %}
"""
    assert ChatTemplate(source).render(conversation("user", "user"), False) == "0"


def test_special_tokens_are_there_only_where_the_model_has_them():
    source = "{{ bos_token is defined }} {{ eos_token }} {{ extra }} {{ tools is none }} {{ thinking }}"
    template = ChatTemplate(source, eos_token="</s>", variables={"extra": "e"})
    assert template.render(HELLO, False, thinking="t") == "False </s> e True t"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ lipsum.__globals__.os }}",
    ],
)
def test_a_template_can_neither_reach_python_nor_change_messages(source):
    with pytest.raises(ModelError, match="the chat template refuses"):
        ChatTemplate(source).render(HELLO, False)


def test_a_refusal_says_what_the_template_says():
    with pytest.raises(ModelError, match="refuses a conversation of assistant, user: user and assistant must"):
        ChatTemplate(template_source("mistral"), bos_token="<s>").render(conversation("assistant", "user"), True)


def test_a_source_that_is_no_template_is_refused_with_its_line():
    with pytest.raises(ModelError, match="not valid Jinja at line 2"):
        ChatTemplate("a\n{% for %}")


@pytest.mark.parametrize(
    ("name", "tool_role", "system_role"),
    [
        ("chatml", "tool", "system"),
        ("qwen", "tool", "system"),
        ("llama3", "tool", "system"),
        ("mistral", "user", "system"),  # refuses tools
        ("llama2", "user", "user"),  # swallows both
        ("gemma", "user", "user"),  # refuses both
        ("phi", "tool", "system"),
    ],
)
def test_roles_a_template_has_no_place_for_are_found(name, tool_role, system_role):
    template = ChatTemplate(template_source(name), bos_token="<s>", eos_token="</s>")
    assert (template.tool_role, template.system_role) == (tool_role, system_role)


def test_tool_messages_become_one_user_message():
    template = ChatTemplate("{{ raise_exception('no') if 'tool' in messages | map(attribute='role') }}" + LINES)
    messages = conversation("user", "assistant", "tool", "tool", "user", "assistant")
    assert template.render(messages, False) == "user:0;assistant:1;user:2\n\n3\n\n4;assistant:5;"
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user", "assistant"]
    # Without a tool message nothing is joined.
    assert template.render(conversation("user", "user"), False) == "user:0;user:1;"


def test_a_system_message_goes_before_the_first_question():
    template = ChatTemplate(LINES.replace("{{ m.role", "{{ raise_exception('no') if m.role == 'system' }}{{ m.role"))
    assert template.render(conversation("system", "user", "assistant"), False) == "user:0\n\n1;assistant:2;"
    assert template.render(conversation("system", "assistant"), False) == "user:0;assistant:1;"


def test_a_template_that_takes_every_role_gets_messages_as_they_are():
    messages = conversation("system", "user", "assistant", "tool", "tool", "user")
    assert ChatTemplate(LINES).render(messages, False) == "system:0;user:1;assistant:2;tool:3;tool:4;user:5;"
