"""Built-in formats: which fields make one, and rows of it in the words of this project.

A row needs a field that asks and, unless tests score it, a field that answers. The pair names the format: `question/answer`.
`messages` is a conversation whose last assistant message is the reference. Every format may have `system`, `tests`,
`test_cases`, `difficulty`, `tags`, `aliases`, and `follow_up` with `follow_up_response`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from polyturn.data.fields import Problems, optional_fields, text_problem
from polyturn.data.json_text import kind_word
from polyturn.errors import nearest
from polyturn.types import Message, Role, Row

OPTIONAL = (
    "system",
    "tests",
    "test_cases",
    "difficulty",
    "tags",
    "aliases",
    "answers",
    "follow_up",
    "follow_up_response",
)
MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class Format:
    """A pair of fields. The text of `context`, where a row has it, follows the question after a blank line."""

    name: str
    prompt: str
    answer: str
    context: str | None = None
    with_tests: bool = False
    """Only a format of rows that have tests."""


FORMATS: tuple[Format, ...] = (
    Format("instruction/response", "instruction", "response", context="input"),
    Format("instruction/output", "instruction", "output", context="input"),
    Format("input/output", "input", "output"),
    Format("problem/solution", "problem", "solution"),
    Format("problem/answer", "problem", "answer"),
    Format("prompt/answer", "prompt", "answer"),
    Format("prompt/response", "prompt", "response"),
    Format("prompt/completion", "prompt", "completion"),
    Format("prompt/solution", "prompt", "solution", with_tests=True),
    Format("question/answer", "question", "answer"),
    Format(MESSAGES, MESSAGES, "answer"),
)
BY_NAME = {form.name: form for form in FORMATS}
BUILT_IN = ("instruction/response", "input/output", "problem/solution", "prompt/answer", "question/answer", MESSAGES)
"""The formats that `polyturn data new` and `convert` write, and that messages name."""
_GIVES_WAY = {"input/output": "instruction/output", "problem/solution": "problem/answer"}
"""A format whose fields are all there too when the one behind it is meant."""
_ALONE = ("instruction/response", "problem/answer", "prompt/answer", "question/answer")
"""What a row with nothing but a question, or with a question and tests, is taken for."""
_NEAR = 0.6
_SCORERS = ("answers", "aliases", "tests", "test_cases")


def recognise(row: Mapping[str, Any], *, need_answer: bool = True) -> list[Format]:
    """The formats whose fields `row` has; more than one means that the row can't be told.

    >>> [form.name for form in recognise({"question": "2 + 2?", "answer": "4", "level": 1})]
    ['question/answer']
    """
    tested = any(row.get(name) for name in ("tests", "test_cases"))
    found = [form for form in FORMATS if _whole(form, row) and (tested or not form.with_tests)]
    names = {form.name for form in found}
    found = [form for form in found if _GIVES_WAY.get(form.name) not in names]
    if not found and (tested or not need_answer):
        found = [BY_NAME[name] for name in _ALONE if BY_NAME[name].prompt in row]
    return found


def dominant(rows: Iterable[Mapping[str, Any]]) -> Format | None:
    """The format that most rows are in; without a row of any, the one they come nearest to; None when none is near."""
    shapes = Counter(tuple(row) for row in rows)
    whole: Counter[str] = Counter()
    part: Counter[str] = Counter()
    for shape, count in shapes.items():
        found = recognise(dict.fromkeys(shape, True))
        if len(found) == 1:
            whole[found[0].name] += count
        for form in FORMATS:
            part[form.name] += round(1000 * count * (_presence(form.prompt, shape) + _presence(form.answer, shape)))
    best = whole.most_common(1) or [item for item in part.most_common(1) if item[1]]
    return BY_NAME[best[0][0]] if best else None


def row_in(
    fields: Mapping[str, Any], where: str, fallback: Format | None, *, need_answer: bool = True
) -> tuple[Row | None, tuple[str, ...]]:
    """`fields` as a Row, or what is wrong with them, a sentence each.

    `fallback` is the format of the file, which a row is held to when its own fields make none.
    """
    found = recognise(fields, need_answer=need_answer)
    if len(found) > 1:
        names = " and ".join(form.name for form in found)
        return None, (f"the fields fit {names}; remove one pair, or give data.transform",)
    form = found[0] if found else fallback
    if form is None or not (found or _touches(form, fields)):
        return None, (_unknown(fields, form),)
    problems = Problems(fields)
    messages, answer = (_conversation if form.name == MESSAGES else _pair)(form, fields, problems)
    options = optional_fields(fields, problems)
    scored = bool(options.tests or options.test_cases)
    answer, aliases = _with_aliases(answer, options.aliases)
    if need_answer and answer is None and not scored and not problems.about(form.answer, form.prompt, *_SCORERS):
        problems.add(form.answer, _no_answer(form, fields))
    if options.system and messages and messages[0].role == "system":
        problems.add("system", "'system' and the system turn of 'messages' are both there; keep one")
    if problems:
        return None, problems.sentences()
    system = (Message(role="system", content=options.system),) if options.system else ()
    known = {form.prompt, form.answer, form.context, *OPTIONAL}
    row = Row(
        where=where,
        format=form.name,
        messages=(*system, *messages),
        answer=answer,
        aliases=aliases,
        tests=options.tests,
        test_cases=options.test_cases,
        difficulty=options.difficulty,
        tags=options.tags,
        follow_up=options.follow_up,
        follow_up_response=options.follow_up_response,
        rest={name: value for name, value in fields.items() if name not in known},
    )
    return row, ()


def _whole(form: Format, row: Mapping[str, Any]) -> bool:
    """Whether a row has both fields of a format; a list `answers` stands in for `answer`."""
    if form.name == MESSAGES:
        return MESSAGES in row
    return form.prompt in row and (form.answer in row or (form.answer == "answer" and "answers" in row))


def _presence(name: str, shape: Sequence[str]) -> float:
    if name in shape:
        return 1.0
    return _NEAR if difflib.get_close_matches(name, shape, n=1) else 0.0


def _touches(form: Format, fields: Mapping[str, Any]) -> bool:
    """Whether a row has something to do with a format: one of its fields, or a name near to one."""
    names = (form.prompt, form.answer)
    return any(name in fields or difflib.get_close_matches(name, fields, n=1) for name in names)


def _unknown(fields: Mapping[str, Any], form: Format | None) -> str:
    found = ", ".join(repr(name) for name in list(fields)[:12]) or "no field"
    if form is not None:
        return f"{form.prompt!r} and {form.answer!r} are missing; found {found}"
    return f"no built-in format has these fields: {found}; {_advice()}"


def _advice() -> str:
    return f"the formats are {', '.join(BUILT_IN)}; rename the fields, or give data.transform"


def _missing(name: str, fields: Mapping[str, Any], form: Format) -> str:
    known = {form.prompt, form.answer, form.context, *OPTIONAL}
    strange = [field for field in fields if field not in known]
    near = nearest(name, strange) if strange else ""
    if near.startswith("did you mean"):
        meant = near.removeprefix("did you mean ").removesuffix("?")
        return f"the field {name!r} is missing; the unknown field {meant!r} may be meant"
    return f"the field {name!r} is missing"


def _pair(form: Format, fields: Mapping[str, Any], problems: Problems) -> tuple[tuple[Message, ...], str | None]:
    prompt = answer = ""
    if form.prompt not in fields:
        problems.add(form.prompt, _missing(form.prompt, fields, form))
    elif (reason := text_problem(form.prompt, fields[form.prompt])) is not None:
        problems.add(form.prompt, reason)
    else:
        prompt = fields[form.prompt]
    if form.context and fields.get(form.context) not in (None, ""):
        reason = text_problem(form.context, fields[form.context])
        problems.add(form.context, reason)
        prompt = prompt if reason else f"{prompt}\n\n{fields[form.context]}"
    if form.answer in fields:
        reason = text_problem(form.answer, fields[form.answer])
        problems.add(form.answer, reason)
        answer = "" if reason else fields[form.answer]
    return (Message(role="user", content=prompt),), answer or None


def _no_answer(form: Format, fields: Mapping[str, Any]) -> str:
    if form.name == MESSAGES:
        return "'messages' ends with a user turn: no assistant turn to learn from; add one, an 'answer', or tests"
    return _missing(form.answer, fields, form)


def _with_aliases(answer: str | None, aliases: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Without an answer the first alias is one."""
    if answer is None and aliases:
        answer = aliases[0]
    return answer, tuple(alias for alias in dict.fromkeys(aliases) if alias != answer)


def _conversation(form: Format, fields: Mapping[str, Any], problems: Problems) -> tuple[tuple[Message, ...], str | None]:
    """Opening messages and reference of a `messages` row."""
    given = fields.get(MESSAGES)
    if MESSAGES not in fields:
        problems.add(MESSAGES, _missing(MESSAGES, fields, form))
        return (), None
    if not isinstance(given, list):
        problems.add(MESSAGES, f"'messages' is {kind_word(given)}; a list of {{role, content}} is needed")
        return (), None
    messages = _messages(given, problems)
    if not given:
        problems.add(MESSAGES, "'messages' is empty")
    if problems or not messages:
        return (), None
    first = next((message for message in messages if message.role != "system"), None)
    if first is None or first.role != "user":
        what = "there is no user turn" if first is None else f"the first turn is from the {first.role}"
        problems.add(MESSAGES, f"{what}; a user or system turn is needed first, then a user turn")
        return (), None
    answer = None
    if messages[-1].role == "assistant":
        answer = messages.pop().content
    if messages[-1].role == "assistant":
        problems.add(MESSAGES, "'messages' ends with two assistant turns; join them, or put the user's turn between")
    if "answer" in fields:
        reason = text_problem("answer", fields["answer"])
        problems.add("answer", reason)
        answer = answer if reason else fields["answer"]
    return tuple(messages), answer


def _messages(given: Sequence[Any], problems: Problems) -> list[Message]:
    messages: list[Message] = []
    for index, item in enumerate(given):
        name = f"messages[{index}]"
        if not isinstance(item, Mapping):
            problems.add(MESSAGES, f"{name} is {kind_word(item)}; an object with role and content is needed")
            continue
        role: Any = item.get("role")
        content: Any = item.get("content")
        if "role" not in item:
            problems.add(MESSAGES, f"{name}.role is missing")
        elif role not in get_args(Role):
            shown = repr(role) if isinstance(role, str) else kind_word(role)
            problems.add(MESSAGES, f"{name}.role is {shown}; one of system, user, assistant or tool is needed")
        elif "content" not in item:
            problems.add(MESSAGES, f"{name}.content is missing")
        elif item.get("tool_calls"):
            problems.add(MESSAGES, f"{name}.tool_calls is structured; write the call into content as the model says it")
        elif (reason := text_problem(f"{name}.content", content, quote=False)) is not None:
            problems.add(MESSAGES, reason)
        else:
            messages.append(Message(role=role, content=content))
    return messages
