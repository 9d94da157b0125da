# SPDX-License-Identifier: Apache-2.0
"""Declare every metric and every event once, for exporters, alerts, dashboard, watch and tests.

Names follow Prometheus: `dynaxx_`, base units (`_seconds`, `_bytes`, `_ratio`), `_total` for counters. Every series
also has the labels `model_name` and `engine`, as in vLLM. Label values are fixed words or small numbers, never content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "info"]
BASE_LABELS = ("model_name", "engine")


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        kind: "info" is a gauge of 1 whose labels are the value; a new value replaces the old one.
        help: one sentence, with the unit if the name does not contain it.
        labels: labels besides the base labels.
        buckets: ascending upper bounds of a histogram, without +Inf.
        combine: how to combine the values of a gauge from several processes.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    combine: Literal["sum", "min", "max", "last"] = "last"

    def __post_init__(self) -> None:
        """Check the name and the buckets against the conventions of Prometheus."""
        assert self.name.startswith("dynaxx_"), self.name
        assert (self.kind == "counter") == self.name.endswith("_total"), f"{self.name}: counters end in _total"
        assert (self.kind == "info") == self.name.endswith("_info"), f"{self.name}: infos end in _info"
        assert (self.kind == "histogram") == bool(self.buckets), f"{self.name}: histograms have buckets"
        assert list(self.buckets) == sorted(set(self.buckets)), f"{self.name}: buckets ascend"
        assert not set(self.labels) & set(BASE_LABELS), f"{self.name}: base labels are not named again"

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The base labels and the metric's other labels."""
        return BASE_LABELS + self.labels


KERNEL_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
HIGH_SHARES = (0.5, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)
ERRORS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

CATALOG: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        # traffic
        Metric("dynaxx_requests_total", "counter", "Prompts by route: sparse, dense.", ("route",)),
        Metric("dynaxx_tokens_total", "counter", "Prompt tokens by route.", ("route",)),
        Metric(
            "dynaxx_request_seconds",
            "histogram",
            "Time of one forward pass over a prompt, or over a chunk of one; at most 20 passes per second are timed.",
            ("route",),
            REQUEST_SECONDS,
        ),
        Metric("dynaxx_kv_cache_bytes", "gauge", "Memory that holds keys and values.", combine="sum"),
        # calls
        Metric(
            "dynaxx_layer_calls_total",
            "counter",
            "Attention calls of layers, by backend (including dense) and phase (prefill, decode).",
            ("backend", "phase"),
        ),
        Metric(
            "dynaxx_dense_calls_total",
            "counter",
            "Attention calls that ran dense, by reason; most reasons are settings of the policy.",
            ("reason",),
        ),
        Metric(
            "dynaxx_fallbacks_total",
            "counter",
            "Attention calls that ran dense because of a failure or the guard, by reason.",
            ("reason",),
        ),
        Metric(
            "dynaxx_density_ratio",
            "histogram",
            "Ratio of visited to causally visible blocks in sampled sparse calls; 1 is dense.",
            ("phase",),
            SHARES,
        ),
        Metric("dynaxx_layer_density_ratio", "gauge", "The layer's last sampled density.", ("layer",)),
        Metric(
            "dynaxx_overlap_ratio",
            "histogram",
            "Ratio of shared to all blocks in the selections of neighbouring rows, sampled.",
            ("phase",),
            SHARES,
        ),
        # speed
        Metric(
            "dynaxx_attention_seconds",
            "histogram",
            "Time of sampled sparse attention calls; in prefill without selection, in decode with it.",
            ("backend", "phase"),
            KERNEL_SECONDS,
        ),
        Metric(
            "dynaxx_selection_seconds",
            "histogram",
            "Time for choosing blocks in sampled sparse prefill calls.",
            ("backend", "phase"),
            KERNEL_SECONDS,
        ),
        Metric(
            "dynaxx_attention_flops_total",
            "counter",
            "Floating point operations over the visited blocks of sampled sparse calls.",
            ("backend", "phase"),
        ),
        Metric(
            "dynaxx_attention_bytes_total",
            "counter",
            "Bytes of q, out and every visited block of keys and values in sampled sparse calls.",
            ("backend", "phase"),
        ),
        # accuracy
        Metric(
            "dynaxx_recall_ratio",
            "histogram",
            "Share of dense attention mass in the visited blocks, estimated on query rows that the guard samples.",
            (),
            HIGH_SHARES,
        ),
        Metric(
            "dynaxx_output_error_ratio",
            "histogram",
            "Relative error of the attention output against dense attention, estimated on the same rows as recall.",
            (),
            ERRORS,
        ),
        Metric(
            "dynaxx_next_token_kl_nats",
            "histogram",
            "Divergence of the next-token distribution from the dense model's, on sampled requests.",
            (),
            ERRORS,
        ),
        Metric("dynaxx_layer_recall_ratio", "gauge", "The layer's running recall estimate.", ("layer",), combine="min"),
        Metric(
            "dynaxx_layer_output_error_ratio",
            "gauge",
            "The layer's running output error estimate.",
            ("layer",),
            combine="max",
        ),
        Metric(
            "dynaxx_layer_drift_ratio",
            "gauge",
            "Drift statistic of the layer's worst head over the policy's threshold; >= 1 means drift.",
            ("layer",),
            combine="max",
        ),
        Metric(
            "dynaxx_guard_checks_total",
            "counter",
            "Sampled calls of the guard by result: ok, violated, or not compared (dropped, too large, decode).",
            ("verdict",),
        ),
        Metric(
            "dynaxx_guard_level",
            "gauge",
            "Level of the guard: 0 no action, 1 warns, 2 widened the budget, 3 runs dense.",
            combine="max",
        ),
        # state
        Metric("dynaxx_policy_info", "info", "The policy in force.", ("version", "digest")),
        Metric("dynaxx_policy_loaded_timestamp_seconds", "gauge", "When the policy came into force, in Unix time."),
        Metric("dynaxx_policy_reloads_total", "counter", "Changed policy files by result: ok, failed.", ("result",)),
        Metric("dynaxx_policy_stale", "gauge", "1 while the policy in force differs from its file.", combine="max"),
        Metric("dynaxx_rollout_ratio", "gauge", "Share of requests that the rollout sends to sparse."),
        Metric("dynaxx_kill_switch", "gauge", "1 while the kill switch keeps everything dense.", combine="max"),
        Metric("dynaxx_uptime_seconds", "gauge", "Seconds since the process began to count.", combine="max"),
        Metric("dynaxx_events_total", "counter", "Events, by name.", ("event",)),
        Metric(
            "dynaxx_snapshot_timestamp_seconds",
            "gauge",
            "When the served snapshot file was written, in Unix time.",
        ),
        Metric(
            "dynaxx_telemetry_errors_total",
            "counter",
            "Errors of telemetry itself, which never affect requests.",
            ("what",),
        ),
    )
}

EVENTS: dict[str, str] = {
    "policy_loaded": "a policy came into force",
    "policy_refused": "a changed policy file was refused; the old policy stays in force",
    "policy_removed": "a policy was removed from its model",
    "kill_switch_on": "the kill switch was turned on",
    "kill_switch_off": "the kill switch was turned off",
    "guard_warned": "an estimate crossed its limit; the policy says to warn",
    "guard_widened": "an estimate crossed its limit; the guard widened the budget",
    "guard_dense": "an estimate crossed its limit; the guard went dense",
    "guard_recovered": "estimates are within their limits again",
    "kernel_failed": "a kernel failed; the call ran dense",
    "compile_failed": "a kernel did not compile; the call ran dense",
    "out_of_memory": "a sparse call ran out of memory; it ran dense",
    "drift_found": "attention differs from the policy's reference profile",
    "drift_gone": "attention matches the policy's reference profile again",
    "retune_recommended": "the policy should be tuned again",
    "telemetry_failed": "an exporter or the snapshot file failed",
}
