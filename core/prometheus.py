"""Prometheus metrics of a run, kept by an observer and written when they are asked for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast, get_args

import numpy as np

from specdec.errors import ConfigError
from specdec.hookspecs import hookimpl
from specdec.outputs import FinishReason
from specdec.request_times import RequestTimes
from specdec.step_counter import Tally, decodes
from specdec.types import SKIP_REASONS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    from specdec.types import StepReport

LABELS = ("model_name", "engine")
COUNTS = {
    "prompt_tokens": "Rows of prompts computed",
    "generation_tokens": "Tokens that requests were given",
    "num_preemptions": "Times that a request was set aside",
}
GAUGES = {
    "num_requests_running": "Requests with a slot",
    "num_requests_waiting": "Requests without a slot yet",
    "kv_cache_usage_perc": "Share of the cache's blocks in use, 0 to 1",
}
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
SECONDS = {  # and the upper bounds of the buckets
    "step_duration_seconds": ("Duration of a step", _SHORT),
    "inter_token_latency_seconds": ("From the tokens of one step to those of the next", _SHORT),
    "request_time_per_output_token_seconds": ("Decode time by tokens after the first", _SHORT),
    "request_prefill_time_seconds": ("From the first slot to the first token", _LONG),
    "request_decode_time_seconds": ("From the first token to the last", _LONG),
    "request_inference_time_seconds": ("From the first slot to the last token", _LONG),
}


class PrometheusMetrics:
    """Counts what a run does and writes it in Prometheus' format: an observer.

    registry: where to register, once; None makes a registry of its own. One LLM, one instance,
        one registry: `prometheus_client.REGISTRY` has the numbers served with the process's own.
    model_name, engine: the labels of every number.

    A step costs a few sums over the batch; the text is made when it is asked for, from any thread.
    Raises `ConfigError` if prometheus-client is not installed, or if the registry has these
    numbers already.
    """

    registry: CollectorRegistry

    def __init__(
        self, registry: CollectorRegistry | None = None, *, model_name: str, engine: str = "0"
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise ConfigError(
                "PrometheusMetrics needs prometheus-client: pip install 'specdec-core[metrics]'"
            ) from error
        for name, value in (("model_name", model_name), ("engine", engine)):
            if not isinstance(value, str):
                raise ConfigError(f"{name} is {value!r}, but it has to be a string: a label")
        if not (registry is None or isinstance(registry, CollectorRegistry)):
            raise ConfigError(
                f"registry is {registry!r}, but it has to be a prometheus_client.CollectorRegistry "
                "or None"
            )
        self._labels = (model_name, engine)
        self._lock = threading.Lock()
        self._tally = Tally.zeros(k=0)  # grows with the drafts of a step
        self._ended = Counter(dict.fromkeys(get_args(FinishReason), 0))
        self._counts: Counter[str] = Counter()
        self._gauges: dict[str, float] = dict.fromkeys(GAUGES, 0)
        self._times = RequestTimes()
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in SECONDS.items()}
        self.registry = CollectorRegistry() if registry is None else registry
        try:
            self.registry.register(cast("Collector", self))
        except ValueError as error:
            raise ConfigError(
                "the registry has metrics of specdec already: give every PrometheusMetrics a "
                "registry of its own, or close() the one before"
            ) from error

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        """Count the step."""
        now = time.perf_counter()
        with self._lock:
            self._count(report)
            self._counts["prompt_tokens"] += report.prompt_tokens
            self._counts["generation_tokens"] += int(report.kept.sum())
            self._counts["num_preemptions"] = report.num_preempted
            self._gauges = {
                "num_requests_running": report.num_running,
                "num_requests_waiting": report.num_waiting,
                "kv_cache_usage_perc": 1 - report.free_blocks / max(report.num_blocks, 1),
            }
            self._ended.update(ended.finish_reason for ended in report.ended)
            self._observe(report, now)

    def text(self) -> str:
        """Everything in the registry, in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()

    def close(self) -> None:
        """Leave the registry."""
        self.registry.unregister(cast("Collector", self))

    def describe(self) -> Iterable[Metric]:
        """The names, for a registry that asks whether they are taken."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """The numbers as they are now; a registry calls it."""
        with self._lock:
            return [*self._speculation(), *self._requests(), *self._seconds()]

    def _count(self, report: StepReport) -> None:
        """Add the decode steps of a step."""
        verified, plain = decodes(report)
        drafted, accepted = report.drafted[verified], report.accepted[verified]
        tally = self._tally
        short = int(drafted.max(initial=0)) + 1 - len(tally.drafted)
        if short > 0:
            drafts, accepts = (np.pad(old, (0, short)) for old in (tally.drafted, tally.accepted))
            self._tally = tally = Tally(drafts, accepts, tally.plain)
        for counts, values in ((tally.drafted, drafted), (tally.accepted, accepted)):
            counts += np.bincount(values, minlength=len(counts))
        np.add.at(tally.plain, report.skipped[plain], 1)

    def _observe(self, report: StepReport, now: float) -> None:
        """Add the durations that end with a step."""
        gaps, ended = self._times.observe(report, now)
        prefill, decode, inference, per_token = np.array(ended).reshape(-1, 4).T
        for name, values in (
            # a report between steps takes no time
            ("step_duration_seconds", np.array([report.seconds] * (report.seconds > 0))),
            ("inter_token_latency_seconds", gaps),
            ("request_prefill_time_seconds", prefill),
            ("request_decode_time_seconds", decode),
            ("request_inference_time_seconds", inference),
            ("request_time_per_output_token_seconds", per_token[~np.isnan(per_token)]),
        ):
            if len(values):
                self._histograms[name].observe(values)

    def _speculation(self) -> Iterator[Metric]:
        numbers = self._tally.metrics()
        steps = numbers.num_drafts + numbers.num_plain_steps
        for name, meaning, value in (
            ("num_drafts", "Steps of a request in which drafts were verified", numbers.num_drafts),
            ("num_draft_tokens", "Drafts verified", numbers.num_draft_tokens),
            ("num_accepted_tokens", "Drafts accepted", numbers.num_accepted_tokens),
            ("num_decode_steps", "Steps of a request that drew a token, with drafts or not", steps),
        ):
            yield self._counter(f"spec_decode_{name}", meaning, value)
        for name, word, columns in (
            ("num_draft_tokens_per_pos", "verified", numbers.drafted_per_pos),
            ("num_accepted_tokens_per_pos", "accepted", numbers.accepted_per_pos),
        ):
            values = {str(i): n for i, n in enumerate(columns)}
            meaning = f"Drafts {word}, by position"
            yield self._counter(f"spec_decode_{name}", meaning, values, "position")
        skipped = dict.fromkeys(SKIP_REASONS, 0) | numbers.skipped
        meaning = "Decode steps of a request without drafts, by reason"
        yield self._counter("spec_decode_num_skipped_steps", meaning, skipped, "reason")

    def _requests(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        for name, meaning in COUNTS.items():
            yield self._counter(name, meaning, self._counts[name])
        meaning = "Requests that ended, by reason"
        yield self._counter("request_success", meaning, self._ended, "finished_reason")
        for name, meaning in GAUGES.items():
            gauge = GaugeMetricFamily(f"specdec:{name}", meaning, labels=LABELS)
            gauge.add_metric(self._labels, self._gauges[name])
            yield gauge

    def _seconds(self) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(f"specdec:{name}", SECONDS[name][0], labels=LABELS)
            family.add_metric(self._labels, histogram.buckets(), histogram.total)
            yield family

    def _counter(
        self, name: str, meaning: str, value: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        """A counter; with a label more, `value` says how much for each of its values."""
        from prometheus_client.core import CounterMetricFamily

        more = () if label is None else (label,)
        family = CounterMetricFamily(f"specdec:{name}", meaning, labels=(*LABELS, *more))
        if isinstance(value, Mapping):
            for word, count in value.items():
                family.add_metric((*self._labels, word), count)
        else:
            family.add_metric(self._labels, value)
        return family


class _Histogram:
    """Values counted by bucket. bounds: upper, ascending, each in its bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self.total = 0.0

    def observe(self, values: NDArray[np.float64]) -> None:
        """Count each of the values."""
        where = np.searchsorted(self._bounds, values)
        self._counts += np.bincount(where, minlength=len(self._counts))
        self.total += float(values.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound with the number of values up to it."""
        bounds = [*(map(str, self._bounds.tolist())), "+Inf"]
        return list(zip(bounds, self._counts.cumsum().tolist(), strict=True))
