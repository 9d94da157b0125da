# SPDX-License-Identifier: Apache-2.0
"""A new pattern or scorer is one file: policies, `explain`, random cases and tables of the guides follow from it."""

import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import torch

import dynaxx as dx
from dynaxx.patterns import Pattern
from dynaxx.patterns.base import Combined, Visited
from dynaxx.patterns.runs import Runs
from dynaxx.policy import ModelFacts, Policy, Rule, parse_policy, policy_text
from dynaxx.selection import Scorer
from dynaxx.settings import RULES, Range, registered, signature
from dynaxx.testing import check_pattern, make_qkv, random_pattern, random_selector

ROOT = Path(__file__).parents[2]
FACTS = ModelFacts(model_type="x", layers=1, q_heads=2, kv_heads=1, head_dim=16)


@pytest.fixture
def own_rules():
    """Define a pattern and a scorer, as a file of their own would."""

    @dataclass(frozen=True)
    class ChunkBefore(Pattern, kind="chunk_before"):
        """Keys of the chunk before the query's own."""

        chunk: Annotated[int, Range(1, 5000)] = 100

        def visible(self, grid, q_pos, k_pos):
            return k_pos // self.chunk == q_pos // self.chunk - 1

        def visited(self, grid):
            first, last = grid.spans()
            begin = (first // self.chunk - 1).clip(0) * self.chunk // grid.block_size[1]
            end = np.minimum(last // self.chunk * self.chunk, grid.seqlen_k)
            return Visited(Runs.one(begin, -(-end // grid.block_size[1])), Runs.none())

    @dataclass(frozen=True)
    class Noise(Scorer, kind="noise"):
        """Random scores."""

        seed: int = 0

        def prepare(self, q, k, grid, scale, *, memory_budget=0):
            generator = torch.Generator().manual_seed(self.seed)
            return lambda start, stop: torch.randn(
                q.shape[0], q.shape[2], stop - start, grid.kv_blocks, generator=generator
            )

    yield ChunkBefore, Noise
    for rule in (ChunkBefore, Noise):
        del RULES[rule.kind]


def test_a_policy_file_names_it_and_its_errors_help(own_rules):
    chunks, noise = own_rules
    rule = (chunks(30) | dx.Sink(2)) | dx.TopK(0.5, noise(3))
    policy = Policy(model=FACTS, block_size=16, rules=(Rule.of(rule),))
    text = policy_text(policy)
    assert '"kind": "chunk_before"' in text
    again = parse_policy(text)
    assert again == policy
    assert again.rules[0].attention.build() == rule
    for wrong, message in (
        (text.replace('"chunk": 30', '"chunk": 0'), r"pattern.parts.0.chunk`: .* greater than or equal to 1, got 0"),
        (text.replace('"chunk": 30', '"chunk": 5001'), r"pattern.parts.0.chunk`: .* less than or equal to 5000"),
        (text.replace('"chunk": 30', '"chunks": 30'), "did you mean `chunk`"),
        (text.replace("chunk_before", "chunk_befor"), "did you mean `chunk_before`"),
    ):
        with pytest.raises(dx.PolicyError, match=message):
            parse_policy(wrong)


def test_its_constructor_says_what_is_wrong(own_rules):
    chunks, _ = own_rules
    with pytest.raises(ValueError, match="`chunk` must be from 1 to 5000, got 0"):
        chunks(0)
    with pytest.raises(TypeError, match=r"`chunk` must be an integer, got 1\.5"):
        chunks(1.5)
    assert type(chunks(np.int32(3)).chunk) is int
    with pytest.raises(ValueError, match="`kind` must be unused, got 'sink'"):
        type("Another", (Pattern,), {}, kind="sink")


def test_random_cases_draw_it_and_calls_explain_it(own_rules):
    chunks, noise = own_rules
    rng = random.Random(0)
    assert any("ChunkBefore" in repr(random_pattern(rng, 100)) for _ in range(200))
    assert any("Noise" in repr(random_selector(rng)) for _ in range(200))
    check_pattern(chunks.random(rng, 90), lengths=[(90, 90)], block_sizes=[16])
    q, k, v = make_qkv(1, 128, 128, 2, 1, 16)
    layout = dx.select_blocks(q, k, chunks(40) | dx.TopK(1, noise()), block_size=16)
    assert "reference" in str(dx.explain(q, k, v, layout))
    assert dx.sparse_attention(q, k, v, layout).isfinite().all()


def test_the_guides_list_it(own_rules, monkeypatch):
    _, noise = own_rules
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import render

    assert "| `ChunkBefore(chunk=100)` | Keys of the chunk before the query's own. |" in [*render.rules("Pattern")]
    assert f"| `{signature(noise)}` | Random scores. |" in [*render.rules("Scorer")]


def test_a_file_in_the_folder_of_patterns_exports_it(tmp_path):
    """Run in another process, which looks for modules in another folder too."""
    (tmp_path / "every_other.py").write_text(
        "from dataclasses import dataclass\n"
        "from dynaxx.patterns.local import Strided\n"
        "@dataclass(frozen=True)\n"
        "class EveryOther(Strided, kind='every_other'):\n"
        "    '''Every other key.'''\n"
        "    stride: int = 2\n"
    )
    code = (
        "import sys, dynaxx.settings, pkgutil; plain = pkgutil.iter_modules\n"
        "def more(paths, prefix=''):\n"
        "    if prefix == 'dynaxx.patterns.': paths.append(sys.argv[1])\n"
        "    return plain(paths, prefix)\n"
        "dynaxx.settings.iter_modules = more\n"
        "from dynaxx.patterns import EveryOther; from dynaxx.policy import to_spec\n"
        "assert to_spec(EveryOther()).model_dump() == {'kind': 'every_other', 'stride': 2}"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)


@pytest.mark.parametrize("rule", registered(Pattern), ids=lambda rule: rule.__name__)
def test_each_pattern_holds_to_its_definition(rule):
    if issubclass(rule, Combined) or not rule.stands_alone:
        pytest.skip("drawn with every pattern, or bound to a grid in tests/video")
    rng = random.Random(1)
    for _ in range(3):
        pattern = rule.random(rng, 90).resolve([rng.randrange(9) for _ in range(90)])
        check_pattern(pattern, lengths=[(90, 90)], block_sizes=[16, (64, 32)])
