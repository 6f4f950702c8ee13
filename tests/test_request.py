"""The output of a prompt: put together from its completions, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from specdec import SamplingParams
from specdec.logprobs import LogprobArrays, LogprobLog, PromptLogprobLog
from specdec.metrics import SpeculationMetrics
from specdec.output_text import OutputText
from specdec.outputs import RequestMetrics
from specdec.request import Request
from specdec.runner.sequence import Sequence

New = Callable[..., Sequence]


@pytest.fixture
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


def text(tokenizer: Any, **values: Any) -> OutputText:
    settings: dict[str, Any] = {
        "stop": (), "include_stop_str_in_output": False, "skip_special_tokens": True,
    }  # fmt: skip
    return OutputText(tokenizer, **{**settings, **values})


def request(*sequences: Sequence, tokenizer: Any = None, prompt: str | None = None) -> Request:
    metrics = RequestMetrics(arrival_time=1.0, num_prompt_tokens=len(sequences[0].prompt))
    return Request("7", prompt, list(sequences), metrics, tokenizer)


def entries(tokens: list[int], n: int = 0) -> LogprobArrays:
    """Entries of these tokens: token t has the log-probability -t."""
    made = LogprobArrays.empty(len(tokens), n)
    made.ids[:] = np.array(tokens)[:, None]
    made.logprobs[:] = -np.array(tokens)[:, None]
    made.ranks[:] = 1
    return made


def test_an_output_says_what_there_is_so_far(new_sequence: New, tokenizer: Any) -> None:
    one = new_sequence([4, 5], text=text(tokenizer))
    mine = request(one, tokenizer=tokenizer, prompt="the cat")
    output = mine.output()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("7", "the cat", [4, 5])
    assert (output.finished, output.error, output.prompt_logprobs) == (False, None, None)
    (completion,) = output.outputs
    assert (completion.index, completion.text, completion.token_ids) == (0, "", [])
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
    assert (completion.finish_reason, completion.stop_reason) == (None, None)
    one.emitted += [6, 7]
    (completion,) = mine.output().outputs
    assert (completion.text, completion.token_ids) == ("sat on", [6, 7])


def test_what_is_handed_out_is_the_readers_own(new_sequence: New) -> None:
    one = new_sequence([4, 5])
    one.emitted.append(6)
    mine = request(one)
    output = mine.output()
    output.prompt_token_ids.clear()
    output.outputs[0].token_ids.clear()
    assert (one.prompt, one.emitted) == ([4, 5], [6])
    kept = mine.output()
    one.emitted.append(7)
    assert kept.outputs[0].token_ids == [6]


def test_a_delta_is_what_came_since_the_last(new_sequence: New, tokenizer: Any) -> None:
    log = LogprobLog(0)
    one = new_sequence([4], text=text(tokenizer), logprobs=log)
    mine = request(one, tokenizer=tokenizer)
    parts = []
    for new in ([6], [7, 8], [], [9]):
        one.emitted += new
        if new:
            log.append(entries(new))
        parts.append(mine.output(delta=True).outputs[0])
    assert [p.token_ids for p in parts] == [[6], [7, 8], [], [9]]
    assert [p.text for p in parts] == ["sat", " on a", "", " mat"]
    assert [[list(e) for e in p.logprobs or []] for p in parts] == [[[6]], [[7], [8]], [], [[9]]]
    # the sum is that of all tokens so far
    assert [p.cumulative_logprob for p in parts] == [-6, -21, -21, -30]
    whole = mine.output().outputs[0]
    assert whole.text == "".join(p.text for p in parts)
    assert whole.token_ids == [6, 7, 8, 9]


def test_looking_at_the_whole_takes_nothing_from_the_deltas(
    new_sequence: New, tokenizer: Any
) -> None:
    one = new_sequence([4], text=text(tokenizer))
    mine = request(one)
    one.emitted += [6, 7]
    assert mine.output().outputs[0].text == mine.output().outputs[0].text == "sat on"
    part = mine.output(delta=True).outputs[0]
    assert (part.token_ids, part.text) == ([6, 7], "sat on")


def test_deltas_of_completions_are_counted_apart(new_sequence: New) -> None:
    params = SamplingParams(n=2)
    one, two = (new_sequence([4], params=params, index=i) for i in range(2))
    mine = request(one, two)
    one.emitted += [5, 6]
    assert [(c.index, c.token_ids) for c in mine.output(delta=True).outputs] == [(0, [5, 6])]
    two.emitted += [7]
    one.emitted += [8]
    assert [c.token_ids for c in mine.output(delta=True).outputs] == [[8], [7]]


def test_the_last_text_is_all_there_is(new_sequence: New, tokenizer: Any) -> None:
    one = new_sequence([4], text=text(tokenizer))
    mine = request(one)
    one.emitted += [6, 7, 1]
    one.finish_reason = "stop"
    output = mine.output(delta=True)
    # without the token that stopped it, which is no text
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("sat on", [6, 7, 1])
    assert output.finished
    again = mine.output(delta=True).outputs[0]
    assert (again.text, again.token_ids) == ("", [])


def test_a_text_with_stop_strings_is_fed_by_the_engine_alone(
    new_sequence: New, tokenizer: Any
) -> None:
    params = SamplingParams(temperature=0, stop=["on a"])
    one = new_sequence([4], params=params, text=text(tokenizer, stop=["on a"]))
    mine = request(one)
    one.emitted += [6, 7]
    assert mine.output().outputs[0].text == ""
    assert one.text.append([6, 7]) is None
    # "on" may be the beginning of the stop string
    assert mine.output().outputs[0].text == "sat "
    assert mine.output().outputs[0].text == "sat "  # fed once
    one.finish_reason = "abort"
    assert mine.output().outputs[0].text == "sat on"


def test_a_request_has_finished_with_the_last_of_its_completions(new_sequence: New) -> None:
    one, two = (new_sequence([4], params=SamplingParams(n=2), index=i) for i in range(2))
    mine = request(one, two)
    one.finish_reason, one.stop_reason = "stop", 9
    one.metrics.finished_time = 5.0
    output = mine.output()
    assert (output.finished, mine.finished, output.metrics.finished_time) == (False, False, None)
    assert [c.finish_reason for c in output.outputs] == ["stop", None]
    two.finish_reason = "length"
    two.metrics.finished_time = 4.0
    output = mine.output()
    assert (output.finished, mine.finished, output.metrics.finished_time) == (True, True, 5.0)
    assert [c.stop_reason for c in output.outputs] == [9, None]


def test_the_numbers_of_completions_are_put_together(new_sequence: New) -> None:
    one, two = (
        new_sequence(
            [4, 5], params=SamplingParams(n=2), index=i, metrics=RequestMetrics(arrival_time=1.0)
        )
        for i in range(2)
    )
    one.emitted, two.emitted = [6, 7, 8], [9]
    one.num_preemptions, two.num_preemptions = 2, 1
    one.metrics.first_scheduled_time, two.metrics.first_scheduled_time = 3.0, 2.0
    two.metrics.first_token_time = 4.0
    one.metrics.speculative_decoding = SpeculationMetrics(num_plain_steps=2, skipped={"budget": 2})
    two.metrics.speculative_decoding = SpeculationMetrics(
        num_drafts=1, num_draft_tokens=2, num_accepted_tokens=1,
        drafted_per_pos=[1, 1], accepted_per_pos=[1, 0],
    )  # fmt: skip
    mine = request(one, two)
    metrics = mine.output().metrics
    assert (metrics.arrival_time, metrics.num_prompt_tokens) == (1.0, 2)
    assert (metrics.first_scheduled_time, metrics.first_token_time) == (2.0, 4.0)
    assert (metrics.num_generated_tokens, metrics.num_preemptions) == (4, 3)
    numbers = metrics.speculative_decoding
    numbers.check()
    assert (numbers.num_drafts, numbers.num_plain_steps) == (1, 2)
    assert numbers.skipped == {"budget": 2}
    # and put together anew each time: nothing is counted twice
    assert mine.output().metrics.speculative_decoding.num_plain_steps == 2
    assert one.metrics.speculative_decoding.num_drafts == 0


def test_an_error_is_told_once(new_sequence: New) -> None:
    sequences = [new_sequence([4], params=SamplingParams(n=3), index=i) for i in range(3)]
    for one, error in zip(sequences, ["it broke", None, "it broke"], strict=True):
        one.finish_reason = "error" if error else "length"
        one.error = error
    assert request(*sequences).output().error == "it broke"
    sequences[1].finish_reason, sequences[1].error = "error", "differently"
    assert request(*sequences).output().error == "it broke; differently"


def test_logprobs_come_as_dicts_with_their_texts(new_sequence: New, tokenizer: Any) -> None:
    of_prompt, of_tokens = PromptLogprobLog(1), LogprobLog(0)
    of_prompt.append(entries([5], n=1))
    of_tokens.append(entries([6]))
    one = new_sequence([4, 5], prompt_logprobs=of_prompt, logprobs=of_tokens)
    one.emitted.append(6)
    output = request(one, tokenizer=tokenizer).output()
    assert output.prompt_logprobs is not None
    first, second = output.prompt_logprobs
    assert first is None
    assert second is not None
    assert (second[5].logprob, second[5].decoded_token) == (-5.0, "cat")
    (entry,) = output.outputs[0].logprobs or []
    assert (entry[6].logprob, entry[6].decoded_token) == (-6.0, "sat")
    assert output.outputs[0].cumulative_logprob == -6.0
    (bare,) = request(one).output().outputs[0].logprobs or []
    assert bare[6].decoded_token is None
