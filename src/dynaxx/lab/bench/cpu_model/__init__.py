# SPDX-License-Identifier: Apache-2.0
"""`dynaxx bench --suite cpu-model`: prefill of a whole model in each engine that a CPU user could pick."""

from dynaxx.lab.bench.cpu_model.run import run_cpu_model_suite

__all__ = ["run_cpu_model_suite"]
