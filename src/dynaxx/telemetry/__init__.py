# SPDX-License-Identifier: Apache-2.0
"""Count what ran, how sparse, how fast and how faithful, and show it through optional exporters."""

from dynaxx.telemetry.catalog import CATALOG, EVENTS, Metric
from dynaxx.telemetry.recorder import Recorder, recorder, use

__all__ = ["CATALOG", "EVENTS", "Metric", "Recorder", "recorder", "use"]
