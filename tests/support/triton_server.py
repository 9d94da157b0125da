# SPDX-License-Identifier: Apache-2.0
"""A real Triton Inference Server from the wheel `nvidia-pytriton`, on free ports of the loopback interface."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SITE = Path(sys.prefix) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
SERVER = SITE / "pytriton" / "tritonserver"
SOURCE = Path(__file__).parents[2] / "src"


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def backends(folder):
    """Copy the wheel's Python backend and the stub for this Python to where the server expects them."""
    target = folder / "backends" / "python"
    if not target.exists():
        shutil.copytree(SERVER / "backends" / "python", target)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        shutil.copy2(SERVER / "python_backend_stubs" / version / "triton_python_backend_stub", target)
    return target.parent


class TritonServer:
    """A server for a model repository, as a context manager that stops it."""

    def __init__(self, repository, folder, *, environment=(), options=("--model-control-mode=explicit",)):
        self.repository, self.log = Path(repository), Path(folder) / "server.log"
        http, grpc, metrics = free_ports(3)
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in (http, grpc, metrics))
        models = [f"--load-model={path.name}" for path in self.repository.iterdir() if path.is_dir()]
        command = [
            SERVER / "bin" / "tritonserver", f"--model-repository={repository}",
            f"--backend-directory={backends(Path(folder))}", f"--http-port={http}", f"--grpc-port={grpc}",
            f"--metrics-port={metrics}", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1",
            "--metrics-address=127.0.0.1", "--exit-timeout-secs=240", *options,
            *(models if "--model-control-mode=explicit" in options else ()),
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "2", "DYNAXX_PYTHONPATH": f"{SOURCE}{os.pathsep}{SITE}"}
        env["LD_LIBRARY_PATH"] = f"{SITE / 'nvidia_pytriton.libs'}:{env.get('LD_LIBRARY_PATH', '')}"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(each) for each in command], env={**env, **dict(environment)}, stdout=log, stderr=subprocess.STDOUT
            )

    def wait(self, seconds=300):
        """Wait until the server is ready."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-6000:]
            try:
                if urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=5).status == 200:
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise AssertionError(self.log.read_text(errors="replace")[-6000:])

    def stop(self, seconds=300):
        """Send SIGTERM, as an orchestrator does; return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def __enter__(self):
        return self.wait()

    def __exit__(self, *_):
        self.stop()
