"""`specdec bench` on a tiny saved model: what it measures, prints and writes."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import attrs
import pytest

from specdec import LLM, Capabilities, Draft, SamplingParams, Speculator, Step, hookimpl
from specdec.cli import main
from specdec.config import SpeculativeConfig

LINES = [
    {"question_id": 1, "category": "cats", "turns": ["the cat sat", "a dog"]},
    {"question_id": 2, "category": "dogs", "turns": ["a dog ran", "the mat"]},
    {"question_id": 3, "category": "cats", "turns": ["a cat on the mat"]},
    {"question_id": 4, "category": "dogs", "prompt": "it ran to the dog"},
]


class Repeating(Speculator):
    """The last token, over and over."""

    def capabilities(self) -> Capabilities:
        return Capabilities()

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        return Draft(tokens=step.next_token[:, None].repeat(1, k))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", *LINES)


def write(file: Path, *lines: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


@pytest.fixture
def bench(
    model_folder: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """Measure; returns exit status, stdout, stderr and what the JSON holds."""
    parse = SpeculativeConfig.parse

    def named(value: Any) -> Any:
        found = parse(value)
        return attrs.evolve(found, method=Repeating) if found else None

    monkeypatch.setattr(SpeculativeConfig, "parse", staticmethod(named))

    def run(*options: object, file: Path = prompts) -> tuple[int, str, str, Any]:
        result = tmp_path / "result.json"
        common = ("--model", model_folder, "--prompts", file, "--json", result)
        status = main(["bench", *map(str, common), "--max-tokens", "10", *map(str, options)])
        captured = capsys.readouterr()
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
        return status, captured.out, captured.err, found

    return run


def test_configurations_are_measured_beside_plain_decoding_with_equal_tokens(
    bench: Any, model_folder: Path, prompts: Path
) -> None:
    status, out, err, found = bench(
        "-sc", "one", "-sc", "two:num_speculative_tokens=2",
        "--temperature", "0,0.8", "--concurrency", "1,3", "--repeat", 2,
    )  # fmt: skip
    assert status == 0
    assert out.startswith(f"{model_folder}, float64, on ")
    assert "| two:num_speculative_tokens=2 |" in out
    assert "loading one\n" in err
    assert "two:num_speculative_tokens=2, T=0.8, c=3, run 2 of 2: " in err
    assert not found["partial"]
    assert len(found["runs"]) == 3 * 2 * 2 * 2
    assert len(found["cells"]) == 3 * 2 * 2
    for cell in found["cells"]:
        assert (cell["answers"], cell["failed"], cell["runs"]) == (8, 0, 2)
        assert cell["tokens"] == sum(
            run["tokens"]
            for run in found["runs"]
            if all(run[k] == cell[k] for k in ("configuration", "temperature", "concurrency"))
        )
        drafted = cell["speculation"]["num_drafts"] > 0
        assert drafted is (cell["configuration"] != "plain")
        if drafted:
            assert cell["equal"] == {"answers": 8, "compared": 8, "promised": True}
            assert cell["speed_up"]["median"] > 0
        assert set(cell["categories"]) == {"cats", "dogs"}
    assert found["environment"]["torch"]
    assert found["prompts"]["lines"] == [1, 2, 3, 4]
    assert found["settings"]["concurrency"] == [1, 3]
    assert found["command"].split()[0] == "specdec"
    assert [c["lossless"] for c in found["configurations"]] == [True] * 3


def test_answers_are_those_of_generate(bench: Any, model_folder: Path) -> None:
    _, _, _, found = bench("--temperature", "0.8", "--seed", 5, "--repeat", 1)
    expected = []
    with LLM(model_folder) as llm:
        for number, line in enumerate(LINES, start=1):
            text = line["turns"][0] if "turns" in line else line["prompt"]  # type: ignore[index]
            params = SamplingParams(temperature=0.8, seed=5 + number, max_tokens=10)
            message = [{"role": "user", "content": text}]
            (output,) = llm.generate(message, params, use_tqdm=False)
            expected.append((len(output.prompt_token_ids), len(output.outputs[0].token_ids)))
    (run,) = found["runs"]
    assert [(a["prompt_tokens"], a["tokens"]) for a in run["answers"]] == expected


def test_all_turns_follow_the_models_own_answers(bench: Any) -> None:
    status, out, _, found = bench("-sc", "one", "--turns", "all", "--repeat", 1)
    assert status == 0
    assert "all turns" in out
    assert found["cells"][1]["equal"] == {"answers": 6, "compared": 6, "promised": True}
    answers = {(a["line"], a["turn"]): a for a in found["runs"][0]["answers"]}
    assert sorted(answers) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (4, 0)]
    assert answers[1, 1]["prompt_tokens"] > answers[1, 0]["prompt_tokens"] + 3


def test_prompts_are_chosen_by_category_and_limit(bench: Any) -> None:
    _, _, _, found = bench("--per-category", 1, "--repeat", 1)
    assert found["prompts"]["lines"] == [1, 2]
    _, _, _, found = bench("--limit", 2, "--repeat", 1)
    assert found["prompts"]["lines"] == [1, 3]


def test_raw_prompts_are_not_wrapped(bench: Any) -> None:
    _, out, _, found = bench("--raw", "--repeat", 1)
    assert [a["prompt_tokens"] for a in found["runs"][0]["answers"]] == [3, 3, 5, 5]
    assert ", raw;" in out
    assert found["prompts"]["chat_template"] is False


def test_a_rule_that_depends_on_drafts_promises_greedy_tokens_only(bench: Any) -> None:
    _, out, _, found = bench(
        "-sc", "one:rejection_sample_method=standard", "--temperature", "0,1", "--repeat", 1
    )
    promised = {c["temperature"]: c["equal"]["promised"] for c in found["cells"] if c["equal"]}
    assert promised == {0.0: True, 1.0: False}
    assert "in brackets where the rule does not promise it" in out


def test_without_a_baseline_nothing_is_compared(bench: Any) -> None:
    status, _, _, found = bench("-sc", "one", "--no-baseline", "--repeat", 1)
    assert status == 0
    (cell,) = found["cells"]
    assert (cell["configuration"], cell["speed_up"], cell["equal"]) == ("one", None, None)


def test_failures_are_counted_told_and_fail(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Repeating, step: Step, k: int) -> Draft:
        raise RuntimeError("never again")

    monkeypatch.setattr(Repeating, "propose", hookimpl(broken))
    status, _, err, found = bench("-sc", "one", "--repeat", 1, "--warmup", 0)
    assert status == 1
    assert "specdec: one: line 1, turn 0 failed: speculator Repeating" in err
    assert "never again" in err
    assert "specdec: 4 answers failed; the JSON has all" in err
    assert [c["failed"] for c in found["cells"]] == [0, 4]
    assert found["cells"][1]["equal"] == {"answers": 0, "compared": 0, "promised": True}


def interrupted(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Press Ctrl-C in this step of whichever engine."""
    step, count = LLM.step, iter(range(100_000))

    def pressed(self: LLM) -> Any:
        if next(count) == at:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(LLM, "step", pressed)


def test_an_interrupt_reports_what_is_finished(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # 40 tokens are a run of plain decoding; the warm-up takes a prompt of each configuration
    interrupted(monkeypatch, 75)
    status, out, err, found = bench("-sc", "one", "--ignore-eos", "--repeat", 2)
    assert status == 130
    assert "PARTIAL" in out
    assert err.endswith("specdec: interrupted; what follows is partial\n")
    assert found["partial"]
    complete = [run["complete"] for run in found["runs"]]
    assert complete == [True] * (len(complete) - 1) + [False]
    assert found["cells"][0]["complete"]


def test_an_interrupt_before_anything_was_measured_is_like_any_other(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, 2)
    status, out, err, found = bench("--repeat", 1)
    assert (status, out, found) == (130, "", None)
    assert err.endswith("specdec: interrupted\n")


def test_an_error_in_the_middle_loses_nothing(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, count = LLM.step, iter(range(1000))

    def broken(self: LLM) -> Any:
        if next(count) == 60:
            raise RuntimeError("out of memory")
        return step(self)

    monkeypatch.setattr(LLM, "step", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        bench("--ignore-eos", "--repeat", 3)
    found = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert found["partial"]
    assert [run["complete"] for run in found["runs"]] == [True, False]


def test_a_picture_without_matplotlib_is_refused_before_anything_is_loaded(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return load(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    status, _, err, _ = bench("--plot", tmp_path / "a.png")
    assert status == 2
    assert "pip install 'specdec-core[bench]'" in err
    assert "loading" not in err


def test_what_is_no_file_is_written_to_and_stays(bench: Any, prompts: Path, tmp_path: Path) -> None:
    result, target, pipe = tmp_path / "result.json", tmp_path / "target.json", tmp_path / "pipe"
    target.touch()
    result.symlink_to(target)
    status, _, _, found = bench("--repeat", 1, "-sc", "one")
    assert status == 0
    assert result.is_symlink()
    assert json.loads(target.read_text(encoding="utf-8")) == found
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert bench("--repeat", 1, "-sc", "one", "--json", pipe)[0] == 0
    assert pipe.is_fifo()
    assert os.read(reader, 12) == b'{\n "format":'
    os.close(reader)


def test_a_picture_is_drawn(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    status, _, _, _ = bench("-sc", "one", "--repeat", 1, "--plot", tmp_path / "a.png")
    assert status == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--no-baseline"], "leaves nothing to measure"),
        (["-sc", "one", "-sc", "one"], "the configuration 'one' is given twice"),
        (["-sc", "{"], "is not valid JSON"),
        (["--concurrency", "5"], "--concurrency 5 needs 5 prompts at least"),
        (["--limit", "1", "--concurrency", "2"], "but there are 1"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--plot", "a.jpeg"], "has to end in one of"),
        (["--json", "/no/such/file"], "--json /no/such/file: it has to be a file in a folder"),
        (["--prompts", "/no/such"], "/no/such cannot be read"),
        (["--sampling-params", '{"detokenize": true}'], "which the command decides itself"),
        (["--max-model-len", "5"], "prompts.jsonl, line 1: the prompt has 5 tokens, but"),
        (["--device", "moon"], "device is 'moon'"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_2(bench: Any, options: list[str], said: str) -> None:
    status, out, err, found = bench(*options)
    assert (status, out, found) == (2, "", None)
    *_, line = err.splitlines()
    assert line.startswith("specdec: ")
    assert said in line


def test_messages_need_a_template(bench: Any, tmp_path: Path) -> None:
    message = {"messages": [{"role": "user", "content": "a dog"}]}
    file = write(tmp_path / "other.jsonl", {"prompt": "it"}, message)
    status, _, err, _ = bench("--raw", file=file)
    assert status == 2
    assert f"{file}, line 2: messages need a chat template, and --raw uses none" in err
    status, _, _, found = bench("--repeat", 1, file=file)
    assert status == 0
    assert found["runs"][0]["answers"][1]["prompt_tokens"] == 4


@pytest.mark.parametrize(
    "options",
    [["--concurrency", "0"], ["--repeat", "x"], ["--turns", "second"], ["--temperature", "hot"]],
)
def test_numbers_that_are_none_are_misuse(bench: Any, options: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench(*options)
    assert caught.value.code == 2
