"""Every hook is a written contract, and the contract modules stay free of torch."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from specdec.hookspecs import PROJECT, Hooks
from specdec.session import HOOKS

SPECS: dict[str, Callable[..., Any]] = {
    name: getattr(Hooks, name) for name in vars(Hooks) if not name.startswith("_")
}
each_spec = pytest.mark.parametrize("name", sorted(SPECS))


def contract(name: str) -> str:
    return inspect.getdoc(SPECS[name]) or ""


def prose(name: str) -> str:
    """The contract with its lines joined, without the example."""
    return " ".join(contract(name).split("Example:")[0].split())


def arguments(name: str) -> list[str]:
    return [p for p in inspect.signature(SPECS[name]).parameters if p != "self"]


def test_every_hook_is_one_the_session_calls() -> None:
    assert sorted(SPECS) == sorted(HOOKS)


@each_spec
def test_a_hook_is_marked_and_has_no_body(name: str) -> None:
    assert hasattr(SPECS[name], f"{PROJECT}_spec")
    lines = textwrap.dedent(inspect.getsource(SPECS[name])).rstrip().splitlines()
    assert lines[-1].strip() == '"""'


@each_spec
def test_the_contract_says_when_and_how_often_it_is_called(name: str) -> None:
    assert re.search(r"Called (once per step|in every step)", prose(name))


@each_spec
def test_the_contract_says_what_happens_if_nobody_answers(name: str) -> None:
    nobody = r"If nobody answers, |Core answers for |Nothing is expected back"
    assert re.search(nobody, prose(name))


@each_spec
def test_the_contract_explains_every_argument_and_its_ownership(name: str) -> None:
    for argument in arguments(name):
        explained = re.search(rf"^{argument}: (.+)$", contract(name), re.MULTILINE)
        assert explained, f"{name} does not say what {argument!r} is"
    assert "Read only" in prose(name)
    assert len(arguments(name)) <= 5
    assert all(
        p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        for p in inspect.signature(SPECS[name]).parameters.values()
    )


@each_spec
def test_the_contract_says_what_is_returned_and_what_none_means(name: str) -> None:
    first = getattr(SPECS[name], f"{PROJECT}_spec")["firstresult"]
    if first:
        assert "Return " in prose(name)
        assert "None" in prose(name)
        assert "The first answer that is not None counts." in prose(name)
    else:
        assert "every implementation is called" in prose(name)
        assert "Nothing is expected back" in prose(name)


@each_spec
def test_the_contract_says_what_an_implementation_must_not_do(name: str) -> None:
    assert re.search(r"\bDo not ", prose(name))


@each_spec
def test_the_contract_says_since_when(name: str) -> None:
    assert re.search(r"Since \d+\.\d+\.?$", prose(name))


@each_spec
def test_the_example_is_an_implementation_that_fits(name: str) -> None:
    example = textwrap.dedent(contract(name).split("Example:")[1])
    assert 3 <= len(example.strip().splitlines()) <= 6
    scope: dict[str, Any] = {}
    code = "from specdec import Draft, hookimpl\nclass Example:\n" + textwrap.indent(
        example, "    "
    )
    exec(compile(code, f"<example of {name}>", "exec"), scope)
    method = getattr(scope["Example"], name)
    assert hasattr(method, f"{PROJECT}_impl")
    wanted = [p for p in inspect.signature(method).parameters if p != "self"]
    assert set(wanted) <= set(arguments(name))


@pytest.mark.parametrize(
    "module",
    [
        "specdec",
        "specdec.checkpoints",
        "specdec.cli",
        "specdec.config",
        "specdec.errors",
        "specdec.hookspecs",
        "specdec.plugins",
        "specdec.speculator",
        "specdec.types",
    ],
)
def test_the_contract_is_imported_without_torch(module: str) -> None:
    code = (
        f"import sys, {module}; heavy = 'torch', 'transformers', 'triton', 'numpy'\n"
        "print([m for m in sys.modules if m in heavy or m.startswith('specdec_plugin')])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found == "[]\n"
