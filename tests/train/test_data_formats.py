"""Every usual form of a row becomes a conversation, whole, or is counted by what is wrong."""

import pytest
from chats import CHAT, CHATML, FORGETFUL, bpe, make_config, make_target

from selfdraft.train.data import load_documents
from selfdraft.train.formats import ALIASES, conversation, prompt_conversation
from selfdraft.train.reading import RowError

TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</call>{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
SHAREGPT = [
    {"from": name, "value": message["content"]}
    for name, message in zip("human gpt user assistant human bing".split(), CHAT, strict=True)
]
CALL = {"name": "weather", "arguments": {"city": "Bonn"}}


def target_of(template):
    return make_target(bpe(template, ["<|im_start|>", "<|im_end|>"], None))


def load(tmp_path, rows, target, **data):
    return load_documents(make_config(tmp_path, rows, **data), target)


def learned(document, target):
    """Text of the loss tokens."""
    ids = [i for i, on in zip(document.ids, document.loss_mask, strict=True) if on]
    return target.tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["messages", "conversations", "conversation"])
@pytest.mark.parametrize("turns", [CHAT, SHAREGPT])
def test_a_chat_under_any_name_and_in_any_keys(name, turns):
    assert conversation({name: turns}).messages == CHAT


def test_d2_every_turn_in_order_and_the_rows_own_system_prompt(tmp_path):
    """D2: a system prompt of the row replaces the template's, out of the loss; two human turns in
    a row stay two."""
    target = target_of(DEFAULT + CHATML)
    turns = [SHAREGPT[0], {"from": "human", "value": "Quickly!"}, *SHAREGPT[1:]]
    rows = [
        {"conversations": turns, "system": "Be brief."},
        {"conversations": turns},
        {"conversations": [{"from": "system", "value": "Be brief."}, *turns]},
        {"conversations": [{"from": "system", "value": "Be kind."}, *turns]},
    ]
    documents = load(tmp_path, rows, target)
    texts = [target.tokenizer.decode(d.ids) for d in documents.train]
    places = [texts[0].index(turn["value"]) for turn in turns]
    assert places == sorted(places) and len(texts) == 4
    assert texts[0] == texts[2] and texts[1] == texts[3]
    assert "Be brief." in texts[0] and "Be kind." not in texts[0] and "Be kind." in texts[1]
    said = "".join(CHAT[i]["content"] + "<|im_end|>" for i in (1, 3, 5))
    assert {learned(d, target) for d in documents.train} == {said}


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_all_aliases_map(alias):
    value = '{"name": "f", "arguments": "{}"}' if ALIASES[alias] == "call" else "x"
    (message,) = conversation({"conversations": [{"from": alias.upper(), "value": value}]}).messages
    assert message["role"] == {"call": "assistant"}.get(ALIASES[alias], ALIASES[alias])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "How?", "response": "So."},
        {"prompt": "How?", "completion": "So."},
        {"instruction": "How?", "input": "", "output": "So."},
        {"question": "How?", "answer": "So."},
        {"prompt": [{"role": "user", "content": "How?"}], "response": "So."},
        {"prompt": "How?", "completion": [{"role": "assistant", "content": "So."}]},
        {"messages": None, "prompt": "How?", "response": "So.", "id": 7},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "How?"}]},
                {"role": "assistant", "content": "So."},
            ]
        },
    ],
)
def test_a_prompt_and_its_response(row):
    assert [(m["role"], m["content"]) for m in conversation(row).messages] == [
        ("user", "How?"),
        ("assistant", "So."),
    ]


def test_alpacas_input_follows_the_instruction():
    (message,) = prompt_conversation({"instruction": "Add.", "input": "1, 2"}).messages
    assert message["content"] == "Add.\n\n1, 2"


def test_prompts_to_answer():
    """A chat is answered at its last user turn; with its system prompt."""
    row = {"conversations": SHAREGPT, "system": "Be brief."}
    messages = prompt_conversation(row).messages
    assert messages == [{"role": "system", "content": "Be brief."}, *CHAT[:5]]
    assert prompt_conversation({"turns": ["a", "b"]}).messages[0]["content"] == "a"
    with pytest.raises(RowError, match="without a user turn"):
        prompt_conversation({"messages": [CHAT[1]]})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "unknown role 'narrator'"),
        ({"conversations": [{"from": 3, "value": "a"}]}, "unknown role '3'"),
        ({"conversations": ["a"]}, "a turn that is no object"),
        ({"conversations": {}}, "conversations is no list"),
        ({"messages": CHAT, "system": 3}, "system prompt that is no text"),
        (
            {"messages": [{"role": "system", "content": "a"}, *CHAT], "system": "b"},
            "two system prompts that differ",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "no text: image"),
        ({"prompt": "How?"}, "a prompt without a response"),
        ({"prompt": "How?", "response": " "}, "a prompt without a response"),
        ({"conversations": [{"from": "function_call", "value": "what?"}]}, "without a name"),
        ({"messages": CHAT, "tools": "one"}, "tools that are no list"),
    ],
)
def test_what_is_wrong_is_said(row, reason):
    with pytest.raises(RowError, match=reason):
        conversation(row)


def test_plain_text_is_learned_from_whole(tmp_path, chatml):
    text = "The owl looked for its dark room."
    rows = [{"text": text, "id": 1}, {"text": ""}, {"text": 5}]
    documents = load(tmp_path, rows, chatml)
    (document,) = documents.train
    assert chatml.tokenizer.decode(document.ids) == text
    assert document.loss_mask == [False] + [True] * (len(document.ids) - 1)
    assert documents.skipped == {"a text that is empty, or none": 2}


TOOL_CHAT = [
    CHAT[0],
    {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]},
    {"role": "tool", "content": "Sunny."},
    {"role": "assistant", "content": "It is sunny."},
]


def test_tool_calls_are_learned_and_tool_turns_are_not(tmp_path):
    """D9: arguments as an object, as JSON text, as a function_call turn: one conversation."""
    target = target_of(TOOLS)
    as_text = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    texted = [{**TOOL_CHAT[1], "tool_calls": [{"type": "function", "function": as_text}]}]
    rows = [
        {"messages": TOOL_CHAT},
        {"messages": [TOOL_CHAT[0], *texted, *TOOL_CHAT[2:]]},
        {
            "conversations": [
                SHAREGPT[0],
                {
                    "from": "function_call",
                    "value": '{"name": "weather", "arguments": {"city": "Bonn"}}',
                },
                {"from": "observation", "value": "Sunny."},
                {"from": "gpt", "value": "It is sunny."},
            ]
        },
        {"messages": TOOL_CHAT, "tools": '[{"name": "weather"}]'},
        {
            "messages": [
                {**TOOL_CHAT[1], "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}
            ]
        },
    ]
    documents = load(tmp_path, rows, target)
    assert len(documents.train) == 5 and not documents.skipped
    first, *same = documents.train[:3]
    assert all(document.ids == first.ids for document in same)
    call = '<call>weather{"city": "Bonn"}</call><|im_end|>It is sunny.<|im_end|>'
    assert learned(first, target) == call
    assert '"weather"}]<|im_end|>' in target.tokenizer.decode(documents.train[3].ids)


def test_what_a_template_leaves_out_is_counted(tmp_path):
    """A template without tools would teach an empty answer where a tool was called."""
    deaf = CHATML.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"
    )
    rows = [
        {"messages": TOOL_CHAT},
        {"messages": [CHAT[0], *TOOL_CHAT[2:]], "tools": [{"name": "f"}]},
        {"messages": CHAT, "system": "Be brief."},
        {"messages": CHAT},
    ]
    documents = load(tmp_path, rows, target_of(deaf))
    assert len(documents.train) == 1
    assert documents.skipped == {
        "the chat template leaves out tool calls": 1,
        "the chat template leaves out tools": 1,
        "the chat template leaves out system turns": 1,
    }


def test_a_template_that_rewrites_earlier_turns_keeps_the_last_one(tmp_path):
    """Templates that drop the reasoning of earlier turns: those are not what the target wrote, so
    they are out of the loss, and counted."""
    target = target_of(FORGETFUL)
    documents = load(tmp_path, [{"messages": CHAT}], target)
    (document,) = documents.train
    assert learned(document, target) == CHAT[5]["content"]
    assert documents.turns == {"the chat template rewrites earlier turns": 2}


@pytest.mark.parametrize("text", ["Eight.", "x", "ends in blanks  ", " \n"])
def test_d5_no_token_behind_a_turn_is_learned(tmp_path, text):
    """D5b, c: first an answer of one token; answers that end in blanks; a template whose turns end
    in a newline and no end-of-turn token."""
    bare = "{% for m in messages %}{{ m.role + ':|' + m.content + '\n---\n' }}{% endfor %}" + (
        "{% if add_generation_prompt %}{{ 'assistant:|' }}{% endif %}"
    )
    turns = [
        {"role": "assistant", "content": text},
        CHAT[0],
        {"role": "assistant", "content": text},
    ]
    for template, end in ((bare, ""), (CHATML, "<|im_end|>")):
        target = target_of(template)
        documents = load(tmp_path, [{"messages": [*turns, CHAT[2], CHAT[3]]}], target)
        (document,) = documents.train
        said = learned(document, target)
        assert CHAT[0]["content"] not in said and "user" not in said and "---" not in said
        answers = [text, text, CHAT[3]["content"]]
        assert said == "".join(answer + end for answer in answers) and not documents.turns


def test_an_answer_that_shares_a_token_with_the_template_is_counted(tmp_path):
    spaced = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n '")
    spaced = spaced.replace("m['role'] + '\n'", "m['role'] + '\n '")
    documents = load(tmp_path, [{"messages": CHAT}], target_of(spaced))
    reason = "the chat template's generation prompt is not a prefix of the turn"
    assert documents.skipped == {reason: 1} or documents.turns == {reason: 1}
