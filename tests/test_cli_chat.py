"""`specdec chat` on a tiny saved model, from a pipe and from a keyboard."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from specdec import LLM, Capabilities, Draft, SamplingParams, Speculator, Step, hookimpl
from specdec.cli import main
from specdec.config import SpeculativeConfig


class Repeating(Speculator):
    """The last token, over and over."""

    def capabilities(self) -> Capabilities:
        return Capabilities()

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        return Draft(tokens=step.next_token[:, None].repeat(1, k))


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def chat(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Chat with so many lines; returns exit status, stdout and stderr."""
    parse = SpeculativeConfig.parse

    def named(value: Any) -> Any:
        found = parse(value)
        return attrs.evolve(found, method=Repeating) if found else None

    monkeypatch.setattr(SpeculativeConfig, "parse", staticmethod(named))

    def run(
        *lines: str, options: tuple[str, ...] = (), typed: bool = False, model: Path = model_folder
    ) -> tuple[int, str, str]:
        text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", Keyboard(text) if typed else io.StringIO(text))
        status = main(["chat", "--model", str(model), "--max-tokens", "8", *options])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def answers(folder: Path, *prompts: str) -> list[str]:
    """What the model says to each rendered prompt, greedily."""
    with LLM(folder) as llm:
        outputs = llm.generate(
            list(prompts), SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
        )
    return [output.outputs[0].text for output in outputs]


def test_answers_go_to_stdout_and_history_is_sent_back(model_folder: Path, chat: Any) -> None:
    status, out, err = chat("the cat", "a dog")
    (first,) = answers(model_folder, "<user> the cat <bot> ")
    (second,) = answers(model_folder, f"<user> the cat <user> {first} <user> a dog <bot> ")
    assert (status, out) == (0, f"{first}\n{second}\n")
    assert len(first) > 5
    assert err.count("tokens/s") == 2
    assert "context 13 of 256]" in err  # the next prompt without its message


def test_numbers_of_speculation_follow_an_answer_that_they_do_not_change(chat: Any) -> None:
    _, plain, without = chat("the cat", "a dog")
    status, out, err = chat("the cat", "a dog", options=("-sc", "double"))
    assert (status, out) == (0, plain)
    assert len(re.findall(r"tokens/step, \d+ of \d+ drafts accepted; acceptance by", err)) == 2
    assert "tokens/step" not in without


def test_undo_drop_and_reset_forget(model_folder: Path, chat: Any) -> None:
    first, other = answers(model_folder, "<user> the cat <bot> ", "<user> a dog <bot> ")
    _, out, err = chat("the cat", "/undo", "a dog", "/drop", "the cat", "/reset", "a dog")
    assert out.splitlines() == [first, other, first, other]
    assert "(taken back, with its answer: 'the cat')" in err
    assert "(turns forgotten: 1 of 1, the first 'a dog')" in err
    assert "(turns forgotten: 1)" in err


def test_the_context_is_one_number_wherever_it_is_told(chat: Any) -> None:
    _, _, err = chat("the cat", "/stats", "a dog", "/stats", "/undo", "/stats", "/reset", "/stats")
    one, same, two, again, undone, none = re.findall(r"context (\d+) of 256]", err)
    assert one == same == undone
    assert two == again
    assert int(two) > int(one)
    assert none == "0"


def test_a_template_that_cannot_end_with_an_answer_leaves_the_context_unknown(
    model_folder: Path, chat: Any, tmp_path: Path
) -> None:
    template = (
        "{% if messages[-1]['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}"
        "{{ messages[-1]['content'] }}"
    )
    folder = without_template(model_folder, tmp_path, template)
    status, _, err = chat("the cat", "/stats", model=folder)
    assert status == 0
    assert err.count("context unknown]") == 2


def test_the_oldest_turns_are_dropped(chat: Any) -> None:
    _, _, err = chat("it", "a dog", "the cat", "/drop 2", "/undo", "/undo")
    assert "(turns forgotten: 2 of 3, the first 'it')" in err
    assert "(taken back, with its answer: 'the cat')" in err
    assert "there is nothing to take back" in err


@pytest.mark.parametrize("number", ["x", "0", "2", "-1", "²", "1" * 5000])
def test_only_turns_that_are_there_are_dropped(chat: Any, number: str) -> None:
    status, _, err = chat("it", f"/drop {number}", "/undo")
    assert status == 1
    assert "/drop takes how many turns to forget, but '" in err
    assert "stands there; turns remembered: 1" in err
    assert "(taken back, with its answer: 'it')" in err


def test_a_system_message_comes_first_and_can_go(model_folder: Path, chat: Any) -> None:
    with_system, without = answers(
        model_folder, "<user> a mat <user> the cat <bot> ", "<user> the cat <bot> "
    )
    _, out, err = chat("/system a mat", "the cat", "/reset", "/system", "the cat")
    assert out.splitlines() == [with_system, without]
    assert "(turns forgotten: 1; the system message stays)" in err
    assert "(the system message is gone; it was 'a mat')" in err
    _, out, _ = chat("the cat", options=("--system", "a mat"))
    assert out == f"{with_system}\n"


def test_a_template_that_drops_the_system_message_is_told(
    model_folder: Path, chat: Any, tmp_path: Path
) -> None:
    folder = without_template(model_folder, tmp_path, "{{ messages[-1]['content'] }}")
    status, _, err = chat("/system a mat", model=folder)
    assert status == 1
    assert "chat template leaves the system message out" in err
    status, _, err = chat(options=("--system", "a mat"), model=folder)
    assert status == 2
    assert err.startswith("specdec: the model's chat template leaves")


def without_template(model_folder: Path, folder: Path, template: str | None = None) -> Path:
    """A copy of the model with another chat template, or without one."""
    for file in model_folder.iterdir():
        if file.suffix != ".jinja":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_model_without_a_template_needs_raw_which_continues_the_text(
    model_folder: Path, chat: Any, tmp_path: Path
) -> None:
    folder = without_template(model_folder, tmp_path)
    status, out, err = chat("the cat", model=folder)
    assert (status, out) == (2, "")
    assert "has no chat template" in err
    assert "with --raw the model continues the text" in err
    status, out, err = chat("the cat", "a dog", "/system it", model=folder, options=("--raw",))
    (first,) = answers(folder, "the cat")
    (second,) = answers(folder, f"the cat{first}\na dog")
    assert (status, out) == (1, f"{first}\n{second}\n")
    assert "there is no system message" in err


def test_a_full_context_is_told_and_nothing_is_lost(chat: Any) -> None:
    status, out, err = chat(
        "the cat sat", "a dog", "/stats", "/drop", "a dog", "/stats",
        options=("--max-model-len", "16", "--max-tokens", "8"),
    )  # fmt: skip
    assert status == 1
    assert len(out.splitlines()) == 2
    assert re.search(r"the context is full: .* has \d+ tokens, and the model takes 15 and one", err)
    assert "The message was not sent" in err
    assert re.search(r"answers: 1; .*; turns remembered: 1", err)
    assert re.search(r"answers: 2; .*; turns remembered: 1", err)


def test_answers_that_are_cut_off_say_why(chat: Any) -> None:
    _, _, err = chat("the cat", options=("--max-tokens", "2"))
    assert "(cut off: --max-tokens allows no more)" in err
    _, _, err = chat("the cat", options=("--max-model-len", "6"))
    assert "(cut off: the context is full)" in err


def test_what_was_said_is_saved_once(chat: Any, tmp_path: Path) -> None:
    file, taken = tmp_path / "chat.json", tmp_path / "taken"
    taken.write_text("mine")
    status, out, err = chat("the cat", f"/save {file}", "a dog", f"/save {file}", f"/save {taken}")
    assert status == 1
    assert taken.read_text() == "mine"
    assert "is there already" in err
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert [m["role"] for m in saved["messages"]] == ["user", "assistant"] * 2
    assert [m["content"] for m in saved["messages"][1::2]] == out.splitlines()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/rest", "there is no command '/rest'; did you mean 'reset'? (known: /reset, /undo,"),
        ("/undo 3", "/undo takes nothing after it, but '3' stands there"),
        ("/drop", "there is nothing to forget"),
        ("/undo", "there is nothing to take back"),
        ("/save", "/save needs the name of a file"),
        ("/save /no/such/file", "/no/such/file cannot be written: No such file or directory\n"),
        ("the \udcff", "is not valid UTF-8"),
    ],
)
def test_mistakes_are_told_and_fail_a_pipe_but_do_not_end_it(
    chat: Any, line: str, said: str
) -> None:
    status, out, err = chat(line, "the cat")
    assert status == 1
    assert f"specdec: {said.split(' ')[0]}" in err or "specdec: the message" in err
    assert said in err
    assert len(out.splitlines()) == 1


def test_two_slashes_send_one(model_folder: Path, chat: Any) -> None:
    status, out, _ = chat("//undo")
    assert (status, out.splitlines()) == (0, answers(model_folder, "<user> /undo <bot> "))


def test_exit_leaves_and_help_names_every_command(chat: Any) -> None:
    status, out, err = chat("/help", "/exit", "the cat")
    assert (status, out) == (0, "")
    for name in ("/reset", "/undo", "/drop", "/system", "/save", "/stats", "/help", "/exit"):
        assert name in err


def test_an_answer_that_fails_takes_its_message_back(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Repeating, step: Step, k: int) -> Draft:
        raise RuntimeError("never again")

    monkeypatch.setattr(Repeating, "propose", hookimpl(broken))
    status, _, err = chat("the cat", "/undo", options=("-sc", "double"))
    assert status == 1
    assert "the answer failed: speculator Repeating" in err
    assert "The message was taken back" in err
    assert "there is nothing to take back" in err


def interrupting(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Press Ctrl-C in these steps of the engine."""
    step, count = LLM.step, iter(range(1000))

    def pressed(self: LLM) -> Any:
        if next(count) in steps:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(LLM, "step", pressed)


def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(
    model_folder: Path, chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, 3)
    status, out, err = chat("the cat", "a dog", "/stats", typed=True)
    assert status == 0
    first, second = out.splitlines()
    assert answers(model_folder, "<user> the cat <bot> ")[0].startswith(f"{first} ")
    assert answers(model_folder, f"<user> the cat <user> {first} <user> a dog <bot> ") == [second]
    assert "(aborted; what was said is kept)" in err
    assert "turns remembered: 2" in err


def chunked(init: Any) -> Any:
    """Let an LLM compute few prompt tokens a step."""

    def made(self: LLM, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings, max_num_batched_tokens=16)

    return made


def test_ctrl_c_before_the_first_word_takes_the_message_back(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, 0)
    # a prompt that takes more than one step, so that the abort comes before a token
    monkeypatch.setattr(LLM, "__init__", chunked(LLM.__init__))
    _, _, err = chat("the cat " * 40, "/undo", typed=True)
    assert "aborted before the first word; the message was taken back" in err
    assert "there is nothing to take back" in err


def test_ctrl_c_in_a_pipe_ends_the_chat(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting(monkeypatch, 3)
    status, _, err = chat("the cat", "a dog")
    assert status == 130
    assert err.endswith("specdec: interrupted\n")


def test_a_person_who_makes_mistakes_leaves_in_peace(chat: Any) -> None:
    status, _, err = chat("/undo", typed=True)
    assert status == 0
    assert "/help shows the commands" in err


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are of POSIX")
def test_on_a_terminal_lines_are_edited_and_ctrl_d_leaves(model_folder: Path) -> None:
    import pty

    pid, terminal = pty.fork()
    if pid == 0:  # the child becomes the chat
        code = "import sys; from specdec.cli import main; sys.exit(main())"
        arguments = ["chat", "--model", str(model_folder), "--max-tokens", "4"]
        os.execv(sys.executable, [sys.executable, "-c", code, *arguments])
    seen = b""

    def wait_for(text: bytes) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 4096)
        seen = seen[seen.index(text) + len(text) :]

    try:
        wait_for(b"> ")
        os.write(terminal, b"xthe cat\x01\x04\n")  # to the start of the line, away with the x
        wait_for(b"context ")
        wait_for(b"> ")
        time.sleep(0.5)  # one that comes before input() waits for keys is seen late
        os.write(terminal, b"a d\x03")
        wait_for(b"leaves)")
        os.write(terminal, b"/sta\t\n")  # completed
        wait_for(b"turns remembered: 1")
        wait_for(b"> ")
        os.write(terminal, b"\x04")
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
