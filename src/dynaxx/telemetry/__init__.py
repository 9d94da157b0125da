"""What ran, how sparse, how fast, how faithful: counted in the process, shown by exporters that nothing else needs."""

from dynaxx.telemetry.catalog import CATALOG, EVENTS, Metric
from dynaxx.telemetry.recorder import Recorder, recorder, use

__all__ = ["CATALOG", "EVENTS", "Metric", "Recorder", "recorder", "use"]
