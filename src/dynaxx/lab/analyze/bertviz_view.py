# SPDX-License-Identifier: Apache-2.0
"""Write the attention of a short excerpt in bertviz's head view (github.com/jessevig/bertviz)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynaxx.lab.analyze.capture import LayerAttention, visit_attention
from dynaxx.lab.analyze.maps import whole_map
from dynaxx.lab.files import write_text

MAX_TOKENS = 128  # the view holds every number of every map: 128 tokens of 30 layers x 9 heads are 20 MB


def write_bertviz(model: Any, tokenizer: Any, excerpt: str, path: Path | str, *, tokens: int = MAX_TOKENS) -> Path:
    """Write bertviz's head view of the first `tokens` tokens of an excerpt; return the file's path.

    bertviz's page loads scripts (d3, jQuery, require.js) from a network when it is opened. dynaxx's report does not.

    Args:
        model: a causal language model of transformers; it is not changed.
        tokenizer: the tokenizer of the model.
        excerpt: text.
        path: an .html file to write.
        tokens: number of tokens to show, 2 to 128.

    Raises:
        ImportError: bertviz is not installed; the message says how to install it.
        ValueError: the excerpt has fewer than two tokens, or the model's maps cannot be read.
    """
    if not 2 <= tokens <= MAX_TOKENS:
        raise ValueError(f"`tokens` must be from 2 to {MAX_TOKENS}, got {tokens}")
    try:
        bertviz = importlib.import_module("bertviz")
    except ImportError as error:
        raise ImportError(f"bertviz is not installed ({error}): pip install bertviz") from error
    ids: list[int] = tokenizer(excerpt, verbose=False)["input_ids"][:tokens]
    if len(ids) < 2:
        raise ValueError(f"`excerpt` must have at least 2 tokens, got {len(ids)}")
    attentions: list[Tensor] = []

    def visit(attention: LayerAttention) -> None:
        every = [whole_map(attention, head) for head in range(attention.q.shape[1])]
        attentions.append(torch.stack(every)[None].double().round(decimals=3))  # short numbers: a smaller page

    visit_attention(model, torch.tensor([ids], dtype=torch.int64, device="cpu"), visit)
    names = tokenizer.convert_ids_to_tokens(ids)
    view = bertviz.head_view(attention=attentions, tokens=names, html_action="return")
    page = "<!doctype html>\n<meta charset='utf-8'>\n<title>Attention, bertviz head view</title>\n"
    return write_text(path, page + view.data)
