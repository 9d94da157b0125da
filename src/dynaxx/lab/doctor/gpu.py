# SPDX-License-Identifier: Apache-2.0
"""What `dynaxx doctor` says about GPUs: what was shown for them, and whether tile sizes were measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dynaxx.kernels.device import gpu_of
from dynaxx.kernels.proven import OPERATIONS, Proof, all_proofs, proof_of, reasons, table


@dataclass(frozen=True)
class GpuStatus:
    """A GPU, what was shown for GPUs of its architecture, and the file of tile sizes that were measured on it."""

    name: str
    architecture: str
    proofs: dict[str, Proof]  # by operation
    tiles: str  # path; "" if none were measured with the installed versions

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        proofs = {operation: proof._asdict() for operation, proof in self.proofs.items()}
        return {"name": self.name, "architecture": self.architecture, "shown": proofs, "tiles": self.tiles or None}

    def lines(self) -> list[str]:
        """Return the lines that the command prints."""
        shown = "; ".join(f"{operation} {proof.state}" for operation, proof in self.proofs.items())
        lines = [f"gpu       {self.name} ({self.architecture}): {shown}"]
        if self.tiles:
            lines.append(f"tiles     measured here: {self.tiles}")
        elif any(proof.state != "measured" for proof in self.proofs.values()):
            lines.append(
                "tiles     never measured: `autotune` of dynaxx.ops.autotune does, and says where it stores them;"
            )
            lines.append("          please send that file to the developers")
        return lines


def gpu_status(device: torch.device) -> GpuStatus | None:
    """Return the status of a device; None for a CPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    from dynaxx.kernels.attention.triton.tuned_tiles import tuned_file

    gpu = gpu_of(device)
    proofs = {operation: proof_of(gpu.architecture, operation) for operation in OPERATIONS}
    path = tuned_file(gpu)
    return GpuStatus(gpu.name, gpu.architecture, proofs, str(path) if path.exists() else "")


class GpuTable:
    """What was shown for every architecture."""

    def to_dict(self) -> dict[str, Any]:
        """Return, by architecture and operation, what was shown."""
        return {architecture: {operation: proof._asdict() for operation, proof in shown.items()}
                for architecture, shown in all_proofs().items()}  # fmt: skip

    def summary(self) -> str:
        """Return the table as text."""
        rows = table()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        pad = lambda row: "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        return "\n".join([*map(pad, rows), "", *reasons()])
