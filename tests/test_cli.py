"""`specdec generate` on a tiny saved model: what it prints, where, and its exit status."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from specdec import (
    LLM,
    Capabilities,
    Draft,
    RequestOutput,
    SamplingParams,
    Speculator,
    Step,
    Verdict,
    VerificationRule,
    __version__,
    cli_generate,
    hookimpl,
)
from specdec.cli import COMMANDS, main
from specdec.config import SpeculativeConfig

GIVEN = "the cat sat"


@pytest.fixture
def ngram(monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration that works without any plugin: the last token, over and over."""
    return given_as(monkeypatch, Repeating)


class Repeating(Speculator):
    def capabilities(self) -> Capabilities:
        return Capabilities(verification=(VerificationRule("always", lossless=False),))

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        return Draft(tokens=step.next_token[:, None].repeat(1, k))

    @hookimpl
    def verify(self, step: Step, draft: Draft, logits: torch.Tensor) -> Any:
        raise RuntimeError("never again")


def given_as(monkeypatch: pytest.MonkeyPatch, speculator: type[Speculator]) -> str:
    """Let the name `double` stand for a class, as an installed plugin's would."""
    parse = SpeculativeConfig.parse

    def named(value: Any) -> Any:
        found = parse(value)
        if found is not None and found.method == "double":
            return attrs.evolve(found, method=speculator)
        return found

    monkeypatch.setattr(SpeculativeConfig, "parse", staticmethod(named))
    return "double"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["generate", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def answer(folder: Path, prompt: str, **params: Any) -> RequestOutput:
    values = {"temperature": 0, "max_tokens": 10, **params}
    with LLM(folder) as llm:
        (output,) = llm.generate(prompt, SamplingParams(**values), use_tqdm=False)
    return output


def test_one_prompt_is_streamed_to_stdout_and_the_numbers_go_to_stderr(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(
        capsys, "--model", model_folder, "--prompt", GIVEN, "--raw", "--max-tokens", 10
    )
    expected = answer(model_folder, GIVEN)
    assert status == 0
    assert out == expected.outputs[0].text + "\n"
    assert len(expected.outputs[0].text) > 10
    tokens = len(expected.outputs[0].token_ids)
    assert err.startswith(f"{tokens} tokens in ")
    assert "drafts" not in err


def test_answers_that_are_cut_off_are_told_with_the_reason(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ("--model", model_folder, "--prompt", GIVEN, "--raw", "--ignore-eos")
    _, _, err = run(capsys, *one, "--max-tokens", 2)
    assert err.endswith("\n(cut off: --max-tokens allows no more)\n")
    _, _, err = run(capsys, *one, "--max-model-len", 8, "--prompt", "a dog")
    assert err.endswith("\n(cut off, 2 of 2 answers: the context is full)\n")
    anything = json.dumps({"stop_token_ids": list(range(32))})
    _, _, err = run(capsys, *one, "--max-tokens", 2, "--sampling-params", anything)
    assert "cut off" not in err


def test_prompts_are_wrapped_in_the_chat_template_unless_raw(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--model", model_folder, "--prompt", GIVEN, "--max-tokens", 10, "--json")
    _, chat, _ = run(capsys, *common)
    _, raw, _ = run(capsys, *common, "--raw")
    assert json.loads(chat)["prompt"] == f"<user> {GIVEN} <bot> "
    assert json.loads(raw)["prompt"] == GIVEN


def test_several_prompts_are_told_apart(
    model_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a dog\n\n   \nit ran\n", encoding="utf-8")
    status, out, _ = run(
        capsys, "--model", model_folder, "--prompt", GIVEN, "--prompts-file", file, "--raw",
        "--max-tokens", 10,
    )  # fmt: skip
    assert status == 0
    texts = [answer(model_folder, p).outputs[0].text for p in (GIVEN, "a dog", "it ran")]
    assert out == f"=== {GIVEN}\n{texts[0]}\n=== a dog\n{texts[1]}\n=== it ran\n{texts[2]}\n"


def test_a_prompt_is_a_line_whatever_else_it_holds(
    model_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffa\u2028dog\x0cran\r\nit\x85ran".encode())
    status, out, _ = run(
        capsys, "--model", model_folder, "--prompts-file", file, "--raw", "--max-tokens", 2,
        "--json",
    )  # fmt: skip
    assert status == 0
    prompts = [json.loads(line)["prompt"] for line in out.strip().split("\n")]
    assert prompts == ["a\u2028dog\x0cran", "it\x85ran"]


def test_prompts_come_from_stdin(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\na dog\n"))
    status, out, _ = run(
        capsys, "--model", model_folder, "--prompts-file", "-", "--raw", "--max-tokens", 4
    )
    assert status == 0
    assert [line for line in out.splitlines() if line.startswith("===")] == [
        "=== the cat",
        "=== a dog",
    ]


def test_json_is_one_object_a_prompt_and_nothing_else(
    model_folder: Path, capsys: pytest.CaptureFixture[str], ngram: str
) -> None:
    status, out, err = run(
        capsys, "--model", model_folder, "--prompt", GIVEN, "--prompt", "a dog", "--raw", "--json",
        "--max-tokens", 10, "-sc", ngram, "--n", 2, "--temperature", 0.7, "--seed", 3,
        "--compare",
    )  # fmt: skip
    assert status == 0
    first, second, last = (json.loads(line) for line in out.splitlines())
    assert (first["prompt"], second["prompt"]) == (GIVEN, "a dog")
    assert len(first["outputs"]) == 2
    expected = answer(model_folder, GIVEN, n=2, temperature=0.7, seed=3)
    assert [o["token_ids"] for o in first["outputs"]] == [c.token_ids for c in expected.outputs]
    assert [o["text"] for o in first["outputs"]] == [c.text for c in expected.outputs]
    assert first["outputs"][0]["finish_reason"] in ("stop", "length")
    assert first["error"] is None
    assert first["speculative_decoding"]["num_drafts"] > 0
    assert "tokens with and without speculation: equal" in err
    assert list(last) == ["comparison"]
    compared = last["comparison"]
    assert (compared["completions"], compared["equal"], compared["equal_expected"]) == (4, 4, True)
    assert compared["gain"] == pytest.approx(
        compared["tokens_per_second"] / compared["plain_tokens_per_second"]
    )


def test_a_comparison_shows_the_gain_and_that_tokens_are_equal(
    model_folder: Path, capsys: pytest.CaptureFixture[str], ngram: str
) -> None:
    for sampling in ((), ("--temperature", "0.8")):
        status, out, err = run(
            capsys, "--model", model_folder, "--prompt", GIVEN, "--max-tokens", 10, "--compare",
            "-sc", f"{ngram}:num_speculative_tokens=3", *sampling,
        )  # fmt: skip
        assert status == 0
        assert "plain decoding: " in out
        assert "x (each ran once)\n" in out
        assert "tokens with and without speculation: equal" in out
        assert "acceptance by position: " in err


def test_sampled_tokens_of_a_rule_that_depends_on_drafts_are_not_held_against_it(
    model_folder: Path, capsys: pytest.CaptureFixture[str], ngram: str
) -> None:
    status, out, _ = run(
        capsys, "--model", model_folder, "--prompt", GIVEN, "--max-tokens", 10, "--compare",
        "-sc", f"{ngram}:rejection_sample_method=standard", "--temperature", 1,
    )  # fmt: skip
    assert status == 0
    assert "their law is the target's" in out


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_lossy_rule_is_called_lossy_and_not_compared(
    model_folder: Path, capsys: pytest.CaptureFixture[str], ngram: str, temperature: int
) -> None:
    status, out, _ = run(
        capsys, "--model", model_folder, "--prompt", GIVEN, "--max-tokens", 10, "--compare",
        "-sc", f"{ngram}:rejection_sample_method=synthetic,synthetic_acceptance_length=2",
        "--temperature", temperature,
    )  # fmt: skip
    assert status == 0
    assert "this rule is not lossless" in out


def test_tokens_that_differ_although_they_should_not_fail(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lying(Repeating):
        def capabilities(self) -> Capabilities:
            return Capabilities(verification=(VerificationRule("always", lossless=True),))

        @hookimpl
        def verify(self, step: Step, draft: Draft, logits: torch.Tensor) -> Any:
            drafted = step.num_drafts
            tokens = torch.cat([draft.tokens, torch.full((step.batch, 1), -1)], dim=1)
            tokens[torch.arange(step.batch), drafted] = 4
            rows = step.logits_start[:-1, None] + torch.arange(tokens.shape[1])
            return Verdict(tokens, drafted + 1, torch.where(tokens >= 0, rows, -1))

    name = given_as(monkeypatch, Lying)
    status, out, _ = run(
        capsys, "--model", model_folder, "--prompt", GIVEN, "--max-tokens", 10, "--compare",
        "-sc", f"{name}:rejection_sample_method=always",
    )  # fmt: skip
    assert status == 1
    assert "tokens with and without speculation: 1 of 1 differ" in out
    assert re.search(r"completion 0/0 differs from token \d+ on", out)
    assert "--deterministic" in out


def test_a_request_that_fails_is_told_on_stderr(
    model_folder: Path, capsys: pytest.CaptureFixture[str], ngram: str
) -> None:
    arguments = (
        "--model", model_folder, "--prompt", GIVEN, "--max-tokens", 10,
        "-sc", f"{ngram}:rejection_sample_method=always",
    )  # fmt: skip
    status, _, err = run(capsys, *arguments)
    assert status == 1
    assert "specdec: request 0 failed: speculator Repeating" in err
    assert "never again" in err
    status, out, _ = run(capsys, *arguments, "--json", "--compare")
    assert status == 1
    outcome, comparison = map(json.loads, out.splitlines())
    assert "never again" in outcome["error"]
    assert comparison["comparison"]["first_differences"] == {"0/0": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/model", "--prompt", "a"], "no model at '/no/such/model'"),
        (["--model", "{model}"], "there is no prompt; give --prompt TEXT or --prompts-file FILE"),
        (
            ["--model", "{model}", "--prompts-file", "/no/such"],
            "/no/such cannot be read: No such file or directory\n",
        ),
        (["--model", "{model}", "--prompt", "a", "--kv-cache-memory", "4X"], "memory is '4X'"),
        (["--model", "{model}", "--prompt", "a", "--max-tokens", "0"], "max_tokens is 0"),
        (["--model", "{model}", "--prompt", "a", "--n", "2"], "n is 2 at temperature 0"),
        (["--model", "{model}", "--prompt", "a", "--sampling-params", "{"], "is not valid JSON"),
        (["--model", "{model}", "--prompt", "a", "--compare"], "--compare needs --speculative"),
        (["--model", "{model}", "--prompt", "a", "-sc", "nosuch"], "no speculator named 'nosuch'"),
        (["--model", "{model}", "--prompt", "a", "-sc", "{{"], "is not valid JSON"),
        (["--model", "{model}", "--prompt", "a", "--dtype", "int7"], "dtype 'int7' cannot be used"),
        (["--model", "{model}", "--prompt", "a", "--device", "moon"], "device is 'moon'"),
        (["--model", "{model}", "--prompt", "a", "--max-model-len", "9999"], "was made for 256"),
        (["--model", "{model}", "--prompt", "a b " * 200, "--raw"], "but max_model_len is 256"),
        (["--model", "{model}", "--prompt", "a", "--tokenizer", "/no/such"], "no tokenizer could"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_2(
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    filled = [a.replace("{model}", str(model_folder)) for a in arguments]
    status, out, err = run(capsys, *filled)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("specdec: ")
    assert len(err.splitlines()) == 1


def test_bytes_that_are_no_utf8_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argument = b"a \xff".decode(errors="surrogateescape")  # as Python reads arguments
    status, _, err = run(capsys, "--model", "/no/such", "--prompt", argument)
    assert status == 2
    assert err == "specdec: the prompt 'a \\udcff' is not valid UTF-8; give it as UTF-8 text\n"
    for errors, said in (
        ("strict", "stdin cannot be read as text: 'utf-8' codec can't decode byte 0xff"),
        ("surrogateescape", "the prompt '\\udcff' is not valid UTF-8"),
    ):
        stdin = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", stdin)
        status, _, err = run(capsys, "--model", "/no/such", "--prompts-file", "-")
        assert status == 2
        assert said in err


def test_misuse_of_the_options_is_argparses(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nosuch"], ["generate"], ["generate", "--model", "m", "--n", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "usage: specdec" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"specdec-core {__version__}" in out
    assert "--speculative-config" in out


def test_an_interrupt_is_said_and_has_its_own_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_generate, "run", interrupted)
    status, out, err = run(capsys, "--model", "m", "--prompt", "a")
    assert (status, out, err) == (130, "", "specdec: interrupted\n")


def test_a_reader_that_goes_away_is_no_traceback(model_folder: Path) -> None:
    command = [
        sys.executable, "-c", "import sys; from specdec.cli import main; sys.exit(main())",
        "generate", "--model", str(model_folder), "--prompt", GIVEN, "--raw",
        "--max-tokens", "200", "--ignore-eos",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read().decode()
        status = process.wait()
    assert status == 1
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(model_folder: Path) -> None:
    command = [sys.executable, "-c", "import sys; from specdec.cli import main; sys.exit(main())"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "plugins"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert done.stderr.decode() == "specdec: cannot write: No space left on device\n"


def test_listing_plugins_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) in (0, 1)
    assert capsys.readouterr().out
