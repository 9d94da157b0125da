# SPDX-License-Identifier: Apache-2.0
"""The kernel package for Hugging Face's `kernels`. `make test-kernels` runs these tests with its loader."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynaxx.engines.hub_kernels import write_kernel_package
from dynaxx.integrations.flash_attn import flash_attn_func

needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("kernels") is None, reason="kernels has an environment of its own: make test-kernels"
)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_kernel_package(tmp_path_factory.mktemp("kernels") / "package")


def test_the_package_names_no_dynaxx_and_holds_all_that_it_imports(package):
    sources = [*(package / "torch-ext").rglob("*.py")]
    assert len(sources) > 100
    for path in sources:
        text = path.read_text()
        assert not re.search(r"^\s*(from|import) dynaxx\b|[\"']dynaxx[.:]", text, flags=re.MULTILINE), path
    assert (package / "build.toml").is_file()
    assert (package / "torch-ext" / "dynaxx_attention" / "core" / "source" / "rules.cpp").is_file()
    with pytest.raises(ValueError, match="already exists"):
        write_kernel_package(package)


@pytest.mark.parametrize("load", ["first", "second"])
def test_it_loads_from_its_path_beside_dynaxx(package, load):
    """Load the package as `kernels` does: by its path, under another name; and again in the same process."""
    variant = package / "build" / "torch-universal"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        q = torch.randn(1, 100, 4, 16, requires_grad=True)
        k, v = torch.randn(1, 100, 2, 16), torch.randn(1, 100, 2, 16)
        out = module.flash_attn_func(q, k, v, causal=True, window_size=(20, 0))
        out.sum().backward()
        torch.testing.assert_close(out, flash_attn_func(q, k, v, causal=True, window_size=(20, 0)))
        layout = (module.Sink(4) | module.SlidingWindow(20)).layout(100, block_size=16)
        assert module.sparse_attention(q, k, v, layout).shape == q.shape
    finally:
        for each in [each for each in sys.modules if each.split(".")[0] == name]:
            del sys.modules[each]


TRANSFORMERS = """
import sys, torch, kernels, dynaxx
sys.path.insert(0, sys.argv[2])
from tiny import llama, tokens
found = kernels.get_local_kernel(__import__("pathlib").Path(sys.argv[1]))
assert found.__file__.startswith(sys.argv[1]) and kernels._rust.Build.open(sys.argv[1]).general.backends
model, ids = llama(), tokens(2, 200)
with torch.no_grad():
    expected = model(ids).logits
    model.set_attn_implementation("dynaxx/dynaxx-attention", allow_all_kernels=True)
    assert model.config._attn_implementation == "dynaxx/dynaxx-attention"
    out = model(ids).logits
    generated = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
model.set_attn_implementation("sdpa")
assert torch.equal(generated, model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None))
print("same logits and tokens")
"""


@needs_kernels
@pytest.mark.slow
def test_transformers_names_it_as_its_attention(package):

    environment = {**os.environ, "LOCAL_KERNELS": f"dynaxx/dynaxx-attention={package}", "HF_HUB_OFFLINE": "1"}
    tests = str(Path(__file__).parents[1] / "support")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", TRANSFORMERS, str(package), tests], env=environment,
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert "same logits and tokens" in done.stdout, done.stderr[-3000:]
