"""What Prometheus reads is what the steps held."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from specdec.errors import ConfigError
from specdec.prometheus import PrometheusMetrics
from specdec.types import SKIP_REASONS, EndedRequest, RequestChanges, RequestInfo, StepReport

client = pytest.importorskip("prometheus_client")

A, B = (RequestInfo(slot=i, request_id="ab"[i], tokens=(1,), prompt_length=1) for i in (0, 1))


def report(
    drafted: tuple[int, ...] = (),
    accepted: tuple[int, ...] = (),
    *,
    decode: bool = True,
    reason: str | None = None,
    kept: int | None = None,
    ended: dict[str, str] | None = None,
    **fields: Any,
) -> StepReport:
    """A step of slots 0, 1, ...; `kept` tokens of each are kept, all unless it is given."""
    some, taken = (np.array(values, dtype=np.int64) for values in (drafted, accepted))
    emitted = taken + 1
    why = -1 if reason is None else SKIP_REASONS.index(reason)
    return StepReport(
        slots=np.arange(len(some)),
        is_decode=np.full(len(some), decode),
        drafted=some,
        accepted=taken,
        emitted=emitted,
        kept=emitted if kept is None else np.full_like(some, kept),
        skipped=np.where(some > 0, -1, why),
        ended=tuple(
            EndedRequest(slot=i, request_id=name, finish_reason=why)
            for i, (name, why) in enumerate((ended or {}).items())
        ),
        **{
            "changes": None,
            "num_running": 2,
            "num_waiting": 0,
            "num_preempted": 0,
            "free_blocks": 6,
            "num_blocks": 8,
            "prompt_tokens": 0,
            "seconds": 0.25,
            **fields,
        },
    )


@pytest.fixture
def metrics() -> PrometheusMetrics:
    return PrometheusMetrics(model_name="toy")


def value(metrics: PrometheusMetrics, name: str, **labels: str) -> float | None:
    """What a scrape says; None if it does not."""
    found: float | None = metrics.registry.get_sample_value(
        f"specdec:{name}", {"model_name": "toy", "engine": "0", **labels}
    )
    return found


# --- speculation ----------------------------------------------------------


def test_drafts_are_counted_under_vllms_stems(metrics: PrometheusMetrics) -> None:
    metrics.step_finished(report((3, 2), (3, 0)))
    metrics.step_finished(report((3, 0), (1, 0), reason="budget"))
    assert value(metrics, "spec_decode_num_drafts_total") == 3
    assert value(metrics, "spec_decode_num_draft_tokens_total") == 8
    assert value(metrics, "spec_decode_num_accepted_tokens_total") == 4
    per_pos = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, per_pos, position=str(i)) for i in range(4)] == [2, 1, 1, None]


def test_positions_drafted_and_steps_without_drafts_are_counted_too(
    metrics: PrometheusMetrics,
) -> None:
    metrics.step_finished(report((1,), (1,)))
    metrics.step_finished(report((3, 0), (0, 0), reason="policy"))
    per_pos = "spec_decode_num_draft_tokens_per_pos_total"
    assert [value(metrics, per_pos, position=str(i)) for i in range(3)] == [2, 1, 1]
    assert value(metrics, "spec_decode_num_decode_steps_total") == 3
    skipped = {
        reason: value(metrics, "spec_decode_num_skipped_steps_total", reason=reason)
        for reason in SKIP_REASONS
    }
    assert skipped == dict.fromkeys(SKIP_REASONS, 0.0) | {"policy": 1.0}


def test_prompts_and_failures_are_no_speculation(metrics: PrometheusMetrics) -> None:
    metrics.step_finished(report((0, 0), (0, -1), decode=False, prompt_tokens=70))
    metrics.step_finished(report((2,), (-1,)))  # it failed: nothing was emitted
    assert value(metrics, "spec_decode_num_drafts_total") == 0
    assert value(metrics, "spec_decode_num_decode_steps_total") == 0
    assert value(metrics, "prompt_tokens_total") == 70


def test_drafts_are_counted_before_and_tokens_after_a_cut(metrics: PrometheusMetrics) -> None:
    metrics.step_finished(report((3,), (3,), kept=2))
    assert value(metrics, "spec_decode_num_accepted_tokens_total") == 3
    assert value(metrics, "generation_tokens_total") == 2


# --- requests -------------------------------------------------------------


def test_requests_are_counted_by_how_they_ended(metrics: PrometheusMetrics) -> None:
    metrics.step_finished(report(ended={"a": "stop", "b": "length"}))
    metrics.step_finished(report(ended={"c": "stop"}))
    ended = {
        reason: value(metrics, "request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert ended == {"stop": 2, "length": 1, "abort": 0, "error": 0}


def test_gauges_are_those_of_the_last_step(metrics: PrometheusMetrics) -> None:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [value(metrics, name) for name in names] == [0, 0, 0]
    metrics.step_finished(report(num_running=9))
    metrics.step_finished(report(num_waiting=5, num_preempted=3))
    assert [value(metrics, name) for name in names] == [2, 5, 0.25]
    assert value(metrics, "num_preemptions_total") == 3


# --- seconds --------------------------------------------------------------


def test_steps_are_in_the_buckets_of_their_durations(metrics: PrometheusMetrics) -> None:
    for seconds in (0.25, 0.3, 99):
        metrics.step_finished(report(seconds=seconds))
    name = "step_duration_seconds"
    buckets = [value(metrics, f"{name}_bucket", le=le) for le in ("0.1", "0.25", "10.0", "+Inf")]
    assert buckets == [0, 1, 2, 3]
    assert value(metrics, f"{name}_count") == 3
    assert value(metrics, f"{name}_sum") == pytest.approx(99.55)


def test_times_of_requests_are_observed_when_they_end(metrics: PrometheusMetrics) -> None:
    metrics.step_finished(
        report((0, 0), (0, 0), decode=False, changes=RequestChanges(added=(A, B)))
    )
    metrics.step_finished(report((0, 2), (0, 2), ended={"a": "stop"}))
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    for name in ("prefill_time", "decode_time", "inference_time", "time_per_output_token"):
        assert value(metrics, f"request_{name}_seconds_count") == 1, name
    prefill, decode, inference = (
        value(metrics, f"request_{name}_time_seconds_sum") or 0.0
        for name in ("prefill", "decode", "inference")
    )
    assert prefill == pytest.approx(0.25)
    assert inference == pytest.approx(prefill + decode)


def test_a_request_of_one_token_has_no_time_per_token(metrics: PrometheusMetrics) -> None:
    changes = RequestChanges(added=(A,))
    metrics.step_finished(report((0,), (0,), decode=False, changes=changes, ended={"a": "length"}))
    assert value(metrics, "request_time_per_output_token_seconds_count") == 0
    assert value(metrics, "request_inference_time_seconds_count") == 1


# --- the text and the registry --------------------------------------------


def test_the_text_is_prometheus_exposition(metrics: PrometheusMetrics) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    metrics.step_finished(report((2,), (1,)))
    families = {family.name: family for family in text_string_to_metric_families(metrics.text())}
    assert all(name.startswith("specdec:") for name in families)
    (sample,) = families["specdec:spec_decode_num_accepted_tokens"].samples
    assert sample.labels == {"model_name": "toy", "engine": "0"}
    assert sample.value == 1


def test_two_with_a_registry_each_count_apart() -> None:
    one, two = PrometheusMetrics(model_name="toy"), PrometheusMetrics(model_name="toy")
    one.step_finished(report((2,), (1,)))
    assert value(one, "spec_decode_num_drafts_total") == 1
    assert value(two, "spec_decode_num_drafts_total") == 0


def test_a_registry_is_refused_a_second_time_until_the_first_has_left_it() -> None:
    registry = client.CollectorRegistry()
    first = PrometheusMetrics(registry, model_name="toy")
    with pytest.raises(ConfigError, match="a registry of its own, or close"):
        PrometheusMetrics(registry, model_name="other", engine="1")
    first.close()
    assert value(PrometheusMetrics(registry, model_name="toy"), "num_requests_running") == 0


def test_a_registry_serves_what_else_is_in_it() -> None:
    registry = client.CollectorRegistry()
    client.Gauge("mine", "Of the user", registry=registry).set(7)
    assert "mine 7.0" in PrometheusMetrics(registry, model_name="toy").text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"registry": "x", "model_name": "toy"}, "registry is 'x', but it has to be"),
        ({"model_name": None}, "model_name is None, but it has to be a string"),
        ({"model_name": "toy", "engine": 0}, "engine is 0, but it has to be a string"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PrometheusMetrics(**arguments)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'specdec-core\[metrics\]'"):
        PrometheusMetrics(model_name="toy")
