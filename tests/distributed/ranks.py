# SPDX-License-Identifier: Apache-2.0
"""Run the cases of a module on several ranks, one process each, once for all cases.

A case is a function `case_*(ranks: Ranks)` that asserts on every rank. The worker runs every case of a module in turn
and reports which failed where, so one start of the processes serves many tests.

RANKS_LOG=FILE: rank 0 adds a line to the file before and after each case, because pytest shows nothing before the end.
RANKS_SECONDS, RANKS_COLLECTIVE_SECONDS: limits of a module, and of one exchange; a busy machine with many ranks needs
more.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).parent
SECONDS = int(os.environ.get("RANKS_SECONDS", "400"))
COLLECTIVE_SECONDS = int(os.environ.get("RANKS_COLLECTIVE_SECONDS", 90 if SECONDS <= 400 else 300))

FAILED, GRACE = 9, 5  # exit code of a rank that failed on a GPU, and seconds that the others then have


@dataclass
class Ranks:
    """The process group of a case, and this process's rank."""

    mesh: object
    rank: int
    count: int
    device: str = "cpu"

    def backend(self, name):
        """Return `name` on a CPU, or any backend on a GPU."""
        return name if self.device == "cpu" else "auto"


def cases_of(module: str) -> list[str]:
    """Return the names of the cases of a module, in order, without importing it."""
    lines = (HERE / f"{module}.py").read_text().splitlines()
    return [line.split("(")[0].removeprefix("def ") for line in lines if line.startswith("def case_")]


def run_cases(module: str, count: int, device: str = "cpu") -> dict[str, list[str]]:
    """Run all cases of a module on `count` ranks, through gloo or NCCL; return the failures of each case, by rank."""
    if device == "cpu":
        _build_core()
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(HERE.parents[1]))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": paths}
        command = [sys.executable, str(HERE / "ranks.py"), module, str(count), folder, device]
        outputs = [Path(folder) / f"{rank}.txt" for rank in range(count)]
        workers = []
        for rank, output in enumerate(outputs):
            with output.open("w") as file:
                workers.append(
                    subprocess.Popen([*command, str(rank)], env=environment, stdout=file, stderr=subprocess.STDOUT)
                )
        _wait(workers)
        said = [output.read_text() for output in outputs]
        results = {name: [] for name in cases_of(module)}
        for rank in range(count):
            path = Path(folder) / f"{rank}.json"
            found = json.loads(path.read_text()) if path.exists() else {}
            for name in results:
                failure = found.get(name, f"did not run: {said[rank][-3000:]}")
                if failure is not None:
                    results[name].append(f"rank {rank}: {failure}")
        return results


def _wait(workers: list[subprocess.Popen]) -> None:
    """Wait for all ranks; kill them after the limit, or soon after one of them has failed on a GPU."""
    end = time.monotonic() + SECONDS
    while any(worker.poll() is None for worker in workers):
        if any(worker.returncode == FAILED for worker in workers):
            end = min(end, time.monotonic() + GRACE)
        if time.monotonic() > end:
            for worker in workers:
                worker.kill()
        time.sleep(0.05)


def _build_core() -> None:
    """Compile the C++ core once here if it is not built yet; ranks that all compile it would wait for one another."""
    import torch

    import dynaxx as dx

    q = torch.zeros(1, 16, 1, 16)
    dx.sparse_attention(q, q, q, dx.Causal().layout(16, block_size=16))


def _log(line: str) -> None:
    """Add a line to the file RANKS_LOG, if there is one."""
    if "RANKS_LOG" in os.environ:
        with Path(os.environ["RANKS_LOG"]).open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {line}\n")


def _work(module: str, count: int, folder: str, device: str, rank: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))  # as torchrun sets them
    torch.set_num_threads(1)
    options = {}
    if device == "cuda":
        torch.cuda.set_device(rank)
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # as docs/guides/distributed.md advises
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        **options,
    )
    ranks = Ranks(init_device_mesh(device, (count,), mesh_dim_names=("sequence",)), rank, count, device)
    cases = importlib.import_module(module)
    found: dict[str, str | None] = {}
    for name in cases_of(module):
        start = time.monotonic(), time.process_time()
        if rank == 0:
            _log(f"{module}.{name} on {count} {device} ranks")
        try:
            getattr(cases, name)(ranks)
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
            _log(f"rank {rank}: {found[name]}")
        if rank == 0:
            wall, used = (now - then for now, then in zip((time.monotonic(), time.process_time()), start, strict=True))
            _log(f"  {'passed' if found[name] is None else 'FAILED'} after {wall:.1f} s, {used:.1f} s of the processor")
        (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
        if device == "cuda" and found[name] is not None:
            os._exit(FAILED)  # the others may wait for this rank on the GPU, where only a watchdog would end them
        verdicts = [None] * count
        dist.all_gather_object(verdicts, found[name] is None)  # keep ranks in step; a rank that hangs ends all
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    _work(sys.argv[1], int(sys.argv[2]), *sys.argv[3:5], int(sys.argv[5]))
