"""Every conversation is checked when a run starts: what would stop it later is named with its line or row."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from megatron_dllm.data import chat_checks
from megatron_dllm.data.chat_checks import ConversationCheck
from megatron_dllm.data.sft import ChatDataset
from megatron_dllm.data.tokenizer import ByteLevel

TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
TURNS = (
    "{{ '<|' + m.role + '|>' + m.content + '\\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + TURNS
)
TOOLS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + '()' }}{% endfor %}{{ m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# forgets what was thought in earlier turns, so that they cannot be found
THINKS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if '</think>' in m.content and not loop.last %}"
    "{{ m.content.split('</think>')[1] }}{% else %}{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_SURROUNDING_SPACE = "{% for m in messages %}{{ 1 / 0 if m.content[:1] == ' ' else '' }}" + TURNS


def user(content, **fields):
    return {"role": "user", "content": content, **fields}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def call(**function):
    return {"id": "1", "function": {"arguments": "{}", **function}}


@pytest.fixture(autouse=True)
def few_are_thorough(monkeypatch):
    monkeypatch.setattr(chat_checks, "THOROUGH", 5)


def write(path, talks):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"messages": talks}), path, row_group_size=7)
    else:
        path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in talks))
    return str(path)


BROKEN = {
    # template -> conversations it takes, one that stops training, and why
    "order of roles": (ALTERNATE, [TALK, TALK + TALK], [user("Why?"), *TALK], "roles must alternate"),
    "first role": (ALTERNATE, [TALK], TALK[1:] + TALK, "roles must alternate"),
    "unknown role": (None, [TALK], [{"role": "critic", "content": "!"}, *TALK], "Message 0 has the role 'critic'"),
    "field of a tool call": (
        TOOLS,
        [TALK, [user("?"), assistant("", tool_calls=[call(name="look")])]],
        [user("?"), assistant("", tool_calls=[call(names="look")])],
        "The chat template rejects the conversation (",
    ),
    "field of the second tool call": (
        TOOLS,
        [[user("?"), assistant("", tool_calls=[call(name="look")] * n)] for n in (1, 2)],
        [user("?"), assistant("", tool_calls=[call(name="look"), call()])],
        "The chat template rejects the conversation (",
    ),
    "type of a field": (
        TOOLS,
        [TALK, [user("?"), assistant("", tool_calls=[call(name="look")])]],
        [user("?"), assistant("", tool_calls=[call(name=7)])],
        "unsupported operand",
    ),
    "a marker where it is unwelcome": (
        THINKS,
        [TALK + TALK, [user("?"), assistant("Hm.</think>Yes.")]],
        [user("?"), assistant("Hm.</think>Yes."), *TALK],
        "not prefix-stable",
    ),
    "white space in front": (NO_SURROUNDING_SPACE, [TALK], [user(" Why?"), TALK[1]], "division by zero"),
}


# a parquet column has one type
PLACES = [
    (name, suffix) for name in BROKEN for suffix in (".jsonl", ".parquet") if suffix == ".jsonl" or "type" not in name
]


@pytest.mark.parametrize(("name", "suffix"), PLACES)
def test_what_only_the_template_rejects(tmp_path, name, suffix):
    template, good, broken, reason = BROKEN[name]
    path = write(tmp_path / ("chat" + suffix), [*good * 10, broken, *good])
    place = f"line {10 * len(good) + 1}" if suffix == ".jsonl" else f"row {10 * len(good)}"
    with pytest.raises(ValueError) as error:
        ChatDataset([path], ByteLevel(), 64, 1, template=template)
    assert str(error.value).startswith(f"{path}, {place}: ") and reason in str(error.value)
    assert "\n" not in str(error.value)
    write(tmp_path / ("chat" + suffix), good * 10)
    assert len(ChatDataset([path], ByteLevel(), 64, 1, template=template)) == 10 * len(good)


@pytest.mark.parametrize("template", [None, ALTERNATE])
def test_ordinary_conversations_are_rendered_a_few_times_only(template):
    check = ConversationCheck(ByteLevel(), template)
    for i in range(300):
        check([user(f"{i}, why?"), assistant(f"Because {i}.")] * (1 + i % 3))
    assert check.rendered == chat_checks.THOROUGH


def test_arguments_of_tools_are_not_kinds_of_their_own():
    check = ConversationCheck(ByteLevel(), TOOLS)
    for i in range(300):
        check([user("?"), assistant("", tool_calls=[call(name="look", arguments={f"key{i}": i})])])
    assert check.rendered <= chat_checks.THOROUGH + 2


def test_the_mask_token_is_found_wherever_it_is_spelled():
    tokenizer = ByteLevel()
    tokenizer.mask_id = ord("~")  # as --dllm-mask-token-id may name any id
    check = ConversationCheck(tokenizer)
    for _ in range(20):
        check(TALK)
    with pytest.raises(ValueError, match="spells the mask token '~'"):
        check([user("Why?"), assistant("About ~5.")])


def test_half_characters(tmp_path):
    half = [user("?"), assistant("a\ud800b")]
    with pytest.raises(ValueError, match=r"line 31: The text of message 1 holds '\\ud800', half of a character"):
        ChatDataset([write(tmp_path / "a.jsonl", [*[TALK] * 30, half])], ByteLevel(), 64, 1)
    in_tool = [user("?"), assistant("", tool_calls=[call(name="\ud800")])]
    with pytest.raises(ValueError, match="line 1: The text of the rendered conversation holds"):
        ChatDataset([write(tmp_path / "b.jsonl", [in_tool])], ByteLevel(), 64, 1, template=TOOLS)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([TALK] * 8 + [None], "row 8: A conversation must be a non-empty list of messages, but this one is None"),
        ([TALK] * 8 + [[]], "row 8: A conversation must be a non-empty list"),
        ([TALK] * 8 + [[*TALK, assistant(None)]], "row 8: The content of message 2 must be a string, but it is None"),
        ([TALK] * 8 + [[None, *TALK]], "row 8: Message 0 must be an object"),
        ([TALK] * 8 + [[TALK[0]]], "row 8: The conversation has no assistant"),
        (["Why?"], "row 0: A conversation must be a non-empty list of messages, but this one is 'Why"),
        ([["Why?", "Because."]], "row 0: Message 0 must be an object"),
        ([[{"role": "user", "text": "Why?"}]], "row 0: The content of message 0 must be a string"),
        ([[{"role": 1, "content": "Why?"}]], "row 0: Message 0 must be an object"),
    ],
)
def test_malformed_rows_of_parquet(tmp_path, rows, reason):
    with pytest.raises(ValueError, match=reason):
        ChatDataset([write(tmp_path / "chat.parquet", rows)], ByteLevel(), 64, 1)


def test_parquet_that_is_not_utf8(tmp_path):
    content = pyarrow.array([b"Why?", b"\xff"]).cast(pyarrow.binary())
    content = pyarrow.StringArray.from_buffers(2, content.buffers()[1], content.buffers()[2])
    roles = pyarrow.array(["assistant"] * 2)
    messages = pyarrow.StructArray.from_arrays([roles, content], ["role", "content"])
    column = pyarrow.ListArray.from_arrays([0, 1, 2], messages)
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "chat.parquet")
    with pytest.raises(ValueError, match="chat.parquet, row 1: .*can't decode byte 0xff"):
        ChatDataset([str(tmp_path / "chat.parquet")], ByteLevel(), 64, 1)


def test_damaged_parquet(tmp_path):
    path = tmp_path / "chat.parquet"
    write(path, [[user(f"{i} " * 40), TALK[1]] for i in range(200)])
    data = bytearray(path.read_bytes())
    data[100:500] = b"\xff" * 400
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"chat.parquet is damaged behind row \d+ \(.*\): replace it.$") as error:
        ChatDataset([str(path)], ByteLevel(), 64, 1)
    assert "\n" not in str(error.value)


def test_deeply_nested_lines(tmp_path):
    nested = json.loads("[" * 900 + "]" * 900)
    with pytest.raises(ValueError, match="line 2: a field is nested too deep"):
        ChatDataset([write(tmp_path / "a.jsonl", [TALK, [user("?", x=nested), TALK[1]]])], ByteLevel(), 64, 1)
    (tmp_path / "chat.jsonl").write_text('{"messages": ' + "[" * 100_000)
    with pytest.raises(ValueError, match=r"chat.jsonl, line 1: it is not valid JSON \(maximum recursion.*line.$"):
        ChatDataset([str(tmp_path / "chat.jsonl")], ByteLevel(), 64, 1)


@pytest.mark.parametrize("template", ["{% for m in messages %}\n{{ m.content }", "{% nosuch %}", "{{ 'x' | nosuch }}"])
def test_template_that_is_not_jinja(tmp_path, template):
    path = write(tmp_path / "chat.jsonl", [TALK])
    with pytest.raises(ValueError, match=r"^The chat template is not valid Jinja \(line [12]: ") as error:
        ChatDataset([path], ByteLevel(), 64, 1, template=template)
    assert "\n" not in str(error.value)


def test_tokenizer_without_eos():
    tokenizer = ByteLevel()
    tokenizer.eos_id = None
    with pytest.raises(ValueError, match="^The tokenizer has no EOS token"):
        ConversationCheck(tokenizer)
