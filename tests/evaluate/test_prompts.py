import pytest

from kvgraft.core.prompt import Segment, render_chat
from kvgraft_lab.evaluate.prompts import Chat, as_parts, as_text, find_chat
from models import CHAT_TEMPLATE, make_tokenizer

SEGMENTS = ("w3 w4", "w5", "w6 w7", "w8")
NO_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') "
    "}}{% endif %}"
    "<user> {{ message.content }} {% endfor %}<assistant>"
)


def test_a_prompt_without_a_chat_template():
    assert as_parts(SEGMENTS) == [Segment("w3 w4\n"), Segment("w5\n"), Segment("w6 w7\n"), "w8"]
    assert as_parts(SEGMENTS, {"w5"}) == ["w3 w4\n", Segment("w5\n"), "w6 w7\n", "w8"]
    assert as_text(SEGMENTS) == "w3 w4\nw5\nw6 w7\nw8"
    assert as_text(SEGMENTS, begun=" w9") == "w3 w4\nw5\nw6 w7\nw8 w9"
    assert find_chat(make_tokenizer()) is None


def test_a_prompt_in_a_chat_template_is_what_the_template_gives():
    tokenizer = make_tokenizer(chat_template=CHAT_TEMPLATE)
    chat = find_chat(tokenizer)
    assert chat == Chat("<system> ", " <user> ", " <assistant> ")
    messages = [
        {"role": "system", "content": "w3 w4"},
        {"role": "user", "content": "w5\nw6 w7\nw8"},
    ]
    assert as_text(SEGMENTS, chat) == render_chat(tokenizer, messages)
    assert as_text(SEGMENTS, chat, " w9") == render_chat(tokenizer, messages) + "w9", (
        "the answer goes on from there"
    )
    parts = as_parts(SEGMENTS, {"w5", "w6 w7"}, chat)
    assert parts == [
        "<system> w3 w4 <user> ",
        Segment("w5\n"),
        Segment("w6 w7\n"),
        "w8 <assistant> ",
    ]


def test_where_there_is_no_system_message_the_user_gives_the_instruction():
    chat = find_chat(make_tokenizer(chat_template=NO_SYSTEM))
    assert as_text(SEGMENTS, chat) == "<user> w3 w4\nw5\nw6 w7\nw8 <assistant>"


def test_the_first_token_of_all_texts_is_not_written_twice():
    tokenizer = make_tokenizer(chat_template="<bos>" + CHAT_TEMPLATE)
    assert find_chat(tokenizer) == Chat("<bos><system> ", " <user> ", " <assistant> "), (
        "this one adds none by itself"
    )

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        return [tokenizer.bos_token_id] * add_special_tokens + [3]

    tokenizer.encode = encode
    assert find_chat(tokenizer) == Chat("<system> ", " <user> ", " <assistant> ")


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "hello", "{{ messages[-1].content | upper }}"]
)
def test_templates_that_change_messages_are_refused(template: str):
    with pytest.raises(ValueError, match="takes no message of a system or a user as it is"):
        find_chat(make_tokenizer(chat_template=template))
