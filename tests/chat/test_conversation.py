"""What was said, as the prompt that it makes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.chat.conversation import Conversation

TURNS = st.lists(st.tuples(st.text("ab ", min_size=1), st.text("cd ")), max_size=4)


def after(turns: list[tuple[str, str]], **settings: object) -> Conversation:
    conversation = Conversation(**settings)  # type: ignore[arg-type]
    for message, answer in turns:
        conversation.add(message, answer)
    return conversation


@given(TURNS, st.none() | st.text("s", min_size=1), st.none() | st.text("m", min_size=1))
def test_roles_take_turns_after_the_system_message(
    turns: list[tuple[str, str]], system: str | None, message: str | None
) -> None:
    messages = after(turns, system=system).prompt(message)
    said = [(m["role"], m["content"]) for m in messages]
    if system is not None:
        assert said.pop(0) == ("system", system)
    if message is not None:
        assert said.pop() == ("user", message)
    expected = [
        (role, text)
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    assert said == expected


def test_raw_text_goes_on_where_the_answer_ended_and_messages_start_a_line() -> None:
    conversation = after([("Once", " upon a time")], raw=True)
    assert conversation.prompt("Then") == "Once upon a time\nThen"


def test_it_is_saved_as_a_prompt_of_its_kind() -> None:
    assert after([("a", "b")], raw=True).as_dict() == {"prompt": "ab\n"}
    assert after([("a", "b")]).as_dict() == {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    }
