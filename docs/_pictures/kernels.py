# SPDX-License-Identifier: Apache-2.0
"""Draw what flows where in each kernel: `python docs/_pictures/kernels.py` writes docs/assets/*.svg."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

ASSETS = Path(__file__).parent.parent / "assets"
COLORS = {
    "global": "#e8eaf6",
    "shared": "#fff3e0",
    "warps": "#c5cae9",
    "host": "#f1f1f1",
    "threads": "#c5cae9",
    "cache": "#fff3e0",
}
LEGEND = {
    "global": "global memory",
    "shared": "shared memory",
    "warps": "warps",
    "host": "host",
    "threads": "threads",
    "cache": "working memory",
}
CELL_X, CELL_Y, LINE = 205, 92, 15


class Box(NamedTuple):
    """A box at a cell of the grid; `text` holds its lines, the first one in bold."""

    x: float
    y: float
    kind: str
    text: str
    width: float = 0.82  # of a cell


class Arrow(NamedTuple):
    """An arrow between two boxes, with the name of the barrier or of what flows."""

    start: str
    end: str
    label: str = ""


class Diagram(NamedTuple):
    """A picture: boxes by name, and arrows between them."""

    boxes: dict[str, Box]
    arrows: list[Arrow]


def size_of(box: Box) -> tuple[float, float, float, float]:
    """Return x, y, width and height of a box in pixels."""
    lines = box.text.count("\n") + 1
    return 12 + box.x * CELL_X, 34 + box.y * CELL_Y, box.width * CELL_X, 14 + LINE * lines


def draw_box(box: Box) -> str:
    """Return a box as SVG."""
    x, y, width, height = size_of(box)
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{COLORS[box.kind]}" stroke="#5c6bc0"/>'
    ]
    for i, line in enumerate(box.text.split("\n")):
        weight = ' font-weight="bold"' if i == 0 else ""
        parts.append(f'<text x="{x + 8}" y="{y + 18 + LINE * i}"{weight}>{escape(line)}</text>')
    return "".join(parts)


def draw_arrow(start: Box, end: Box, label: str) -> str:
    """Return an arrow between the nearest sides of two boxes as SVG."""
    xa, ya, wa, ha = size_of(start)
    xb, yb, wb, hb = size_of(end)
    if xa + wa <= xb or xb + wb <= xa:  # side by side: leave at the height of the flatter box
        middle = min(ya + ha, yb + hb) / 2 + max(ya, yb) / 2
        from_y = to_y = middle
        if not (max(ya, yb) < middle < min(ya + ha, yb + hb)):
            from_y, to_y = ya + ha / 2, yb + hb / 2
        points = (xa + wa, from_y, xb, to_y) if xa + wa <= xb else (xa, from_y, xb + wb, to_y)
    else:
        middle = min(xa + wa, xb + wb) / 2 + max(xa, xb) / 2
        points = (middle, ya + ha, middle, yb) if ya < yb else (middle + 12, ya, middle + 12, yb + hb)
    x1, y1, x2, y2 = points
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#37474f" marker-end="url(#head)"/>'
    vertical = abs(x2 - x1) < abs(y2 - y1)
    anchor, dx, dy = ("start", 6, 4) if vertical else ("middle", 0, -5)
    at_x, at_y = (x1 + x2) / 2 + dx, (y1 + y2) / 2 + dy
    return line + f'<text x="{at_x}" y="{at_y}" text-anchor="{anchor}" class="label">{escape(label)}</text>'


def draw(diagram: Diagram) -> str:
    """Return a diagram as an SVG document."""
    sizes = [size_of(box) for box in diagram.boxes.values()]
    width = max(x + w for x, _, w, _ in sizes) + 12
    height = max(y + h for _, y, _, h in sizes) + 12
    kinds = dict.fromkeys(box.kind for box in diagram.boxes.values())
    legend = "".join(
        f'<rect x="{12 + 130 * i}" y="8" width="12" height="12" fill="{COLORS[kind]}" stroke="#5c6bc0"/>'
        f'<text x="{28 + 130 * i}" y="18">{LEGEND[kind]}</text>'
        for i, kind in enumerate(kinds)
    )
    arrows = "".join(draw_arrow(diagram.boxes[a.start], diagram.boxes[a.end], a.label) for a in diagram.arrows)
    boxes = "".join(draw_box(box) for box in diagram.boxes.values())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">'
        "<style>text{font:12px sans-serif;fill:#212121}.label{font-size:10.5px;fill:#37474f}</style>"
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#37474f"/></marker></defs>'
        f"{legend}{boxes}{arrows}</svg>\n"
    )


DIAGRAMS = {
    "hopper_forward": Diagram(
        {
            "layout": Box(0, 0, "global", "layout\norder, kv_indptr,\nkv_indices, codes, bands"),
            "qkv": Box(0, 1.25, "global", "q, k, v"),
            "producer": Box(1.2, 0, "warps", "producer\n1 warp, 24 registers\nreads the layout, runs ahead"),
            "q": Box(2.6, 0, "shared", "q, row numbers\n2 slots (1 at head_dim 256)"),
            "kv": Box(2.6, 0.8, "shared", "k and v, step numbers\n2 to 6 stages"),
            "consumer": Box(
                4.1,
                0.05,
                "warps",
                "consumer 0 and 1\n4 warps each, 240 registers\n64 query rows each\ns = q k, softmax, acc += p v",
                1.05,
            ),
            "out": Box(4.1, 1.6, "global", "out, lse", 1.05),
        },
        [
            Arrow("layout", "producer"),
            Arrow("producer", "q", "q_full"),
            Arrow("producer", "kv", "k_full, v_full"),
            Arrow("qkv", "kv", "TMA"),
            Arrow("q", "consumer", "q_empty"),
            Arrow("kv", "consumer", "k_empty, v_empty"),
            Arrow("consumer", "out", "TMA"),
        ],
    ),
    "hopper_backward_one_pass": Diagram(
        {
            "layout": Box(0, 0, "global", "transposed layout\nq blocks of each kv block"),
            "q": Box(0, 1.2, "global", "q, do, lse, delta"),
            "producer": Box(1.1, 0, "warps", "producer\n1 warp\nall heads of the group"),
            "tiles": Box(2.3, 0, "shared", "q and do, lse, delta\n64 queries per stage\nk and v, 128 keys"),
            "consumer": Box(3.7, 0, "warps", "consumer 0 and 1\n64 keys each; dk and dv\nin registers", 0.95),
            "ds": Box(3.7, 1.2, "shared", "ds of both consumers\n4 slots (2 at head_dim 64)", 0.95),
            "dq": Box(2.3, 1.2, "shared", "one tile of dq\nfp32"),
            "sums": Box(2.3, 2.2, "global", "sums of dq, fp32\nthen dq in bf16"),
            "dkv": Box(5.1, 0, "global", "dk, dv"),
        },
        [
            Arrow("layout", "producer"),
            Arrow("q", "tiles", "TMA"),
            Arrow("producer", "tiles", "full"),
            Arrow("tiles", "consumer", "empty"),
            Arrow("consumer", "ds", "ds_full"),
            Arrow("ds", "dq", "dq = ds k"),
            Arrow("dq", "sums", "TMA adds"),
            Arrow("consumer", "dkv", "TMA"),
        ],
    ),
    "hopper_backward_two_passes": Diagram(
        {
            "kv": Box(0, 0, "shared", "k and v\ntiles of 64 keys"),
            "dq_producer": Box(0, 1, "warps", "producer\nreads rows of the layout"),
            "dq": Box(
                1.3, 0, "warps", "dq kernel\n1 or 2 consumers, 64 queries each\nq, do resident; dq in registers", 1.15
            ),
            "dq_out": Box(1.3, 1.1, "global", "dq"),
            "qdo": Box(2.9, 0, "shared", "q and do\ntiles of 64 queries"),
            "dkv_producer": Box(2.9, 1, "warps", "producer\nreads columns of the layout"),
            "dkv": Box(
                4.2, 0, "warps", "dk, dv kernel\none consumer per 64 keys; at\nhead_dim 256 one for dv, one for dk", 1.2
            ),
            "dkv_out": Box(4.2, 1.1, "global", "dk, dv"),
        },
        [
            Arrow("dq_producer", "kv", "k_full, v_full"),
            Arrow("kv", "dq", "k_empty, v_empty"),
            Arrow("dq", "dq_out"),
            Arrow("dkv_producer", "qdo", "full"),
            Arrow("qdo", "dkv", "empty"),
            Arrow("dkv", "dkv_out"),
        ],
    ),
    "triton_forward": Diagram(
        {
            "layout": Box(0, 0, "global", "row of the layout\npartial blocks, then full"),
            "kv": Box(0, 1, "global", "k, v"),
            "masked": Box(1.2, 0, "warps", "loop 1: partial tiles\nscores, mask,\nonline softmax"),
            "full": Box(2.4, 0, "warps", "loop 2: full tiles\nno masks; in bf16\nno maxima"),
            "out": Box(3.6, 0, "global", "out, lse\nlse = NaN: out of range"),
            "again": Box(3.6, 1.1, "warps", "second launch\nonly tiles with NaN,\nwith maxima"),
        },
        [
            Arrow("layout", "masked"),
            Arrow("kv", "masked", "TMA"),
            Arrow("masked", "full", "acc, max, sum"),
            Arrow("full", "out"),
            Arrow("out", "again"),
        ],
    ),
    "triton_backward": Diagram(
        {
            "rows": Box(0, 0, "global", "layout\nrows"),
            "dq": Box(1.1, 0, "warps", "dq kernel\none tile of queries per program\nq, do in registers", 1.0),
            "stats": Box(2.5, 0, "global", "lse and delta\nside by side"),
            "dkv": Box(3.6, 0, "warps", "dk, dv kernel\none tile of keys per program\nsums over the group", 1.0),
            "columns": Box(5.0, 0, "global", "transposed layout\ncolumns"),
            "dq_out": Box(1.1, 1.1, "global", "dq"),
            "dkv_out": Box(3.6, 1.1, "global", "dk, dv"),
        },
        [
            Arrow("rows", "dq"),
            Arrow("dq", "stats"),
            Arrow("stats", "dkv", "TMA"),
            Arrow("columns", "dkv"),
            Arrow("dq", "dq_out"),
            Arrow("dkv", "dkv_out"),
        ],
    ),
    "decode": Diagram(
        {
            "summaries": Box(0, 0, "global", "summaries\nint8, by page"),
            "score": Box(1.1, 0, "warps", "1. score pages\nq x bounds, integers\non the matrix unit"),
            "scores": Box(2.2, 0, "global", "scores\n(batch, kv_heads, pages)"),
            "attend": Box(3.4, 0, "warps", "2. choose and attend\nall lists of pages, cut\nevenly among programs", 1.0),
            "parts": Box(4.8, 0, "global", "parts: out, lse"),
            "merge": Box(4.8, 1.05, "warps", "3. merge\nby lse"),
            "cache": Box(3.4, 1.15, "global", "paged k, v\nonly chosen pages", 1.0),
            "out": Box(3.4, 2.0, "global", "out, lse"),
        },
        [
            Arrow("summaries", "score"),
            Arrow("score", "scores"),
            Arrow("scores", "attend"),
            Arrow("cache", "attend", "page table"),
            Arrow("attend", "parts"),
            Arrow("parts", "merge"),
            Arrow("merge", "out"),
        ],
    ),
    "selection": Diagram(
        {
            "qk": Box(0, 0, "global", "q, k"),
            "mean": Box(1.0, 0, "warps", "1. mean queries\nper q block"),
            "score": Box(2.1, 0, "warps", "2. scores\nmean query x every key,\none number per block", 0.9),
            "choose": Box(3.3, 0, "warps", "3. choice\nbisects a threshold\nper row, no sort"),
            "scan": Box(4.4, 0, "warps", "4, 5. running sum\nof entries per row"),
            "layout": Box(4.4, 1.1, "warps", "6. entries\npartial first, then full"),
            "out": Box(3.3, 1.1, "global", "BlockLayout\non the GPU"),
        },
        [
            Arrow("qk", "mean"),
            Arrow("mean", "score"),
            Arrow("score", "choose"),
            Arrow("choose", "scan"),
            Arrow("scan", "layout"),
            Arrow("layout", "out"),
        ],
    ),
    "nsa_forward": Diagram(
        {
            "k": Box(0, 0, "global", "q, k, v"),
            "cmp": Box(0, 1.1, "warps", "compress\none kernel for k, one for v"),
            "cattn": Box(1.1, 1.1, "warps", "compressed branch\nattention, lse"),
            "scores": Box(1.1, 2.1, "warps", "scores of blocks\n1 producer, 3 consumers"),
            "top": Box(2.3, 2.1, "warps", "top-k\none warp per row"),
            "union": Box(3.4, 2.1, "warps", "unions of blocks\nof neighbouring positions"),
            "sel": Box(
                3.4,
                0.7,
                "warps",
                "selected blocks + window\n1 producer, 3 consumers;\neach block of the union once",
                1.0,
            ),
            "out": Box(4.9, 0.7, "global", "out = sum of\ngate x branch"),
        },
        [
            Arrow("k", "cmp"),
            Arrow("cmp", "cattn"),
            Arrow("cattn", "scores", "lse"),
            Arrow("scores", "top"),
            Arrow("top", "union"),
            Arrow("union", "sel"),
            Arrow("cattn", "sel", "out of the branch"),
            Arrow("sel", "out"),
        ],
    ),
    "tokens_forward": Diagram(
        {
            "chosen": Box(0, 0, "global", "chosen tokens\nof each query"),
            "union": Box(1.1, 0, "warps", "unions\nof neighbouring queries,\none bit per query"),
            "list": Box(2.3, 0, "global", "list of a tile\nascending, with marks"),
            "kv": Box(2.3, 1.15, "global", "k, v\nrows anywhere"),
            "attend": Box(3.5, 0, "warps", "attention\nqueries x heads of a tile\nonline softmax", 0.95),
            "rows": Box(3.5, 1.15, "shared", "rows of k and v\nloaded ahead", 0.95),
            "out": Box(4.9, 0, "global", "out, lse"),
        },
        [
            Arrow("chosen", "union"),
            Arrow("union", "list"),
            Arrow("list", "attend"),
            Arrow("kv", "rows", "gather"),
            Arrow("rows", "attend"),
            Arrow("attend", "out"),
        ],
    ),
    "tokens_backward": Diagram(
        {
            "list": Box(0, 0, "global", "list of a tile\nlse, delta"),
            "tile": Box(1.1, 0, "warps", "tile of queries\np and ds of its list\ndq in registers"),
            "dq": Box(1.1, 1.15, "global", "dq"),
            "rows": Box(2.3, 0, "global", "rows of dk and dv\none per key of the list,\nat most 4 GiB"),
            "table": Box(2.3, 1.15, "warps", "table of entries\nlists that name each key"),
            "sum": Box(3.5, 0, "warps", "sums\none program per key,\nin the order of queries"),
            "dkv": Box(4.7, 0, "global", "dk, dv"),
        },
        [
            Arrow("list", "tile"),
            Arrow("tile", "dq"),
            Arrow("tile", "rows"),
            Arrow("rows", "sum"),
            Arrow("table", "sum"),
            Arrow("sum", "dkv"),
        ],
    ),
    "cpu": Diagram(
        {
            "layout": Box(0, 0, "host", "plan of a layout\nruns of keys for each\npanel of 16 queries", 0.95),
            "task": Box(
                1.3,
                0,
                "threads",
                "task: a row of blocks\nof some heads, longest first\neach thread takes the next",
                1.0,
            ),
            "gather": Box(2.7, 0, "cache", "128 rows of k and v\ngathered, widened"),
            "scores": Box(3.8, 0, "threads", "tile product 1\nrows of k x panel"),
            "weights": Box(4.9, 0, "cache", "weights\none row per key"),
            "out": Box(4.9, 1.1, "threads", "tile product 2\nrows of v x weights"),
            "result": Box(3.8, 1.1, "global", "out, lse"),
        },
        [
            Arrow("layout", "task"),
            Arrow("task", "gather"),
            Arrow("gather", "scores"),
            Arrow("scores", "weights", "softmax"),
            Arrow("weights", "out"),
            Arrow("out", "result"),
        ],
    ),
}


def main() -> None:
    """Write all diagrams."""
    for name, diagram in DIAGRAMS.items():
        (ASSETS / f"{name}.svg").write_text(draw(diagram), encoding="utf-8")


if __name__ == "__main__":
    main()
