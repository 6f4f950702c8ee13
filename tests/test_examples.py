"""Every file in examples/ runs on a tiny model, says what it promises and stays short."""

from __future__ import annotations

import asyncio
import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, SamplingParams
from specdec.testing import save_tiny_model

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LONGEST = 40  # lines

needs_ngram = pytest.mark.skipif(
    not entry_points(group="specdec.plugins", name="ngram"), reason="ngram is not installed"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Llama and a tokenizer of bytes."""
    folder = str(tmp_path_factory.mktemp("model"))
    save_tiny_model(folder)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@needs_ngram
def test_generate_answers_every_prompt(run: Any, model: str) -> None:
    said = run("generate.py", model, "one, one, one, one", "two", "--max-tokens", "8")
    assert said.count("->") == 2
    assert said.count("tokens per step") == 2


def test_own_speculator_changes_nothing(run: Any, model: str) -> None:
    assert "same tokens as without: True" in run("own_speculator.py", model, "again again")


@needs_ngram
def test_observe_prints_every_step(run: Any, model: str) -> None:
    *steps, last = run("observe.py", model, "ab ab ab ab").splitlines()
    assert steps[0] == "step 1, slot 0: prompt, 0 drafts, 1 emitted"
    assert last == f"24 tokens in {len(steps)} steps"


def test_serve_async_answers_every_connection(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    serve = runpy.run_path(str(EXAMPLES / "serve_async.py"))["main"]
    said = ""

    async def ask(port: int, prompts: list[str]) -> list[str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.writelines(f"{prompt}\n".encode() for prompt in prompts)
        writer.write_eof()
        answered = (await reader.read()).decode()
        writer.close()
        return answered.split("\n")

    async def main() -> tuple[list[str], list[str]]:
        nonlocal said
        serving = asyncio.ensure_future(serve(model, "0"))
        while not said.endswith("\n"):
            await asyncio.sleep(0.01)
            said += capsys.readouterr().out
        port = int(said.split()[-1])
        (_, gone) = await asyncio.open_connection("127.0.0.1", port)
        gone.write(b"hello\n")
        gone.close()
        answers = await asyncio.gather(ask(port, ["ab", "cd"]), ask(port, ["cd", "ab"]))
        serving.cancel()
        await asyncio.wait([serving])
        return answers

    one, other = asyncio.run(main())
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM(model) as llm:
        expected = [o.outputs[0].text for o in llm.generate(["ab", "cd"], params, use_tqdm=False)]
    assert said.startswith("listening on port")
    assert one == "\n".join([*expected, ""]).split("\n")
    assert other == "\n".join([*expected[::-1], ""]).split("\n")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONGEST


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    assert [p.name for p in EXAMPLES.glob("*.py") if f'"{p.name}"' not in tested] == []
