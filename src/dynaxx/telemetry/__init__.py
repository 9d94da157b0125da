# SPDX-License-Identifier: Apache-2.0
"""Count what ran, how sparse, how fast and how faithful, and show it through optional exporters.

The files:

    recorder, store, snapshot, catalog  the numbers, and every metric by name
    probe, samples                      what integrations measure
    prometheus, otel, files, logging    exporters
    dashboard                           the Grafana dashboard, made from the catalog
    sources, overview, facts, terminal, web, http  `dynaxx watch`
"""

from dynaxx.telemetry.catalog import CATALOG, EVENTS, Metric
from dynaxx.telemetry.recorder import Recorder, recorder, use

__all__ = ["CATALOG", "EVENTS", "Metric", "Recorder", "recorder", "use"]
