# SPDX-License-Identifier: Apache-2.0
"""`dynaxx tune` for a pipeline: a tiny one of Wan's classes with random weights, saved to a folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dynaxx as dx
from dynaxx.cli import app
from dynaxx.video import VideoRule, apply, load_policy
from dynaxx.video.tune.run import Settings, cases_of
from dynaxx.video.tune.sampling import MAX_PSNR, Pipeline, psnr, relative_error, ssim

ROOT = Path(__file__).parents[2]


def invoke(*words):
    return CliRunner().invoke(app, ["tune", *map(str, words)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a pipeline and a file of prompts."""
    diffusers = pytest.importorskip("diffusers", reason="make test-video")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "</s>", "a", "red", "cat", "dog", "runs"]
    tokens = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(words, range(8), strict=True)), "[UNK]"))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()

    def transformer():
        model = diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
            text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32)  # fmt: skip
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.ndim > 1 else 0.1))
        return model

    pipe = diffusers.WanPipeline(
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]", eos_token="</s>"
        ),
        text_encoder=transformers.UMT5EncoderModel(
            transformers.UMT5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        vae=diffusers.AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer(),
    )
    path = tmp_path_factory.mktemp("pipelines")
    pipe.save_pretrained(path / "wan")
    pair = diffusers.WanPipeline(**pipe.components | {"transformer_2": transformer()}, boundary_ratio=0.9)
    pair.save_pretrained(path / "wan2.2")
    (path / "prompts.txt").write_text("a red cat\n\na dog runs\na red dog\n")
    return path


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_is_tuned_and_its_policy_runs(folder):
    out = folder / "run"
    done = invoke(folder / "wan", "--prompts", folder / "prompts.txt", "--frames", 13, "--size", "96x112", "--steps", 4,
                  "--out", out, "--min-psnr", 20, "--block-size", 16, "--json", "--device", "cpu")  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads((out / "tuning.json").read_text())
    figures = found["validation"]
    assert figures["psnr"] >= 20
    assert figures["density"] < 1
    assert {"error", "ssim", "frames_psnr", "uniform_psnr"} <= set(figures)
    policy = load_policy(out / "policy.json")
    assert policy.model.model_type == "WanTransformer3DModel"
    assert policy.evidence[0].values == figures
    page = (out / "report.html").read_text()
    assert page.count("data:image/png") == 8
    assert "http" not in page.split("</style>")[1].replace("http://www.w3.org", "")


@pytest.mark.filterwarnings("ignore")
def test_two_transformers_are_tuned_to_one_policy_for_both(folder):
    diffusers = pytest.importorskip("diffusers")
    done = invoke(folder / "wan2.2", "--prompts", folder / "prompts.txt", "--frames", 9, "--size", "96x112",
                  "--steps", 5, "--out", folder / "two", "--min-psnr", 20, "--block-size", 16, "--json",
                  "--device", "cpu")  # fmt: skip
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)["validation"]
    policy = load_policy(folder / "two" / "policy.json")
    pipe = diffusers.WanPipeline.from_pretrained(folder / "wan2.2")
    ((prompt, seed),) = cases_of(Settings("", ("a red cat", "a dog runs", "a red dog"), Path()))[1]
    sampler = Pipeline(pipe, num_frames=9, height=96, width=112, num_inference_steps=5)
    switch = sampler.switch
    assert 0 < switch < 1
    assert switch in policy.starts
    dense = sampler.sample(prompt, seed).latents
    both = pipe.transformer, pipe.transformer_2
    first, second = (apply(each, policy, scheduler=pipe.scheduler) for each in both)
    assert psnr(sampler.sample(prompt, seed).latents, dense) == pytest.approx(figures["psnr"], abs=0.01)
    calls = [sum(handle.counts.values()) for handle in (first, second)]
    assert calls == [round(5 * switch) * 4, round(5 * (1 - switch)) * 4]  # 2 layers, with and without the prompt
    for handle in (first, second):
        handle.remove()
    late = policy.model_copy(update={"rules": (VideoRule.of(dx.TopK(0.3), steps=(switch, 1.0)),)})
    first, second = (apply(each, late, scheduler=pipe.scheduler) for each in both)
    sampler.sample(prompt, seed)
    assert (set(first.counts), set(second.counts)) == ({"dense: no rule"}, {"sparse"})
    pipe.transformer_2.blocks = pipe.transformer_2.blocks[:1]
    with pytest.raises(ValueError, match="transformers of one shape"):
        Pipeline(pipe)


@pytest.mark.filterwarnings("ignore")
def test_a_limit_that_nothing_keeps_gives_the_dense_policy(folder):
    done = invoke(folder / "wan", "--prompts", folder / "prompts.txt", "--frames", 5, "--size", "64x64", "--steps", 2,
                  "--out", folder / "none", "--min-psnr", 300, "--no-residuals", "--block-size", 16, "-q")  # fmt: skip
    assert done.exit_code == 1
    assert "no sparse policy keeps 300 dB" in done.stdout
    assert load_policy(folder / "none" / "policy.json").rules == ()


def test_wrong_options_are_named(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "empty.txt").write_text("\n")
    for words, said in {
        (tmp_path,): "--prompts must name a file",
        (tmp_path, "--prompts", tmp_path / "empty.txt"): "which has none",
        (tmp_path, "--prompts", __file__, "--size", "480"): "--size must be height x width",
        ("smollm2", "--frames", "3"): "are for pipelines of diffusers",
        ("smollm2", "--no-residuals"): "are for pipelines of diffusers",
    }.items():
        done = invoke(*words, "--out", tmp_path / "out")
        assert done.exit_code == 2
        assert said in done.stderr.replace("\n", " ")


def test_cases_hold_prompts_and_seeds_apart():
    settings = Settings("x", ("a", "b", "c"), Path())
    assert cases_of(settings) == ([("a", 0), ("b", 1)], [("c", 1000)])
    assert cases_of(Settings("x", ("a",), Path(), seed=5)) == ([("a", 5)], [("a", 1005)])


def test_measures():
    frames = torch.rand(3, 16, 16, 3)
    assert psnr(frames, frames) == MAX_PSNR
    assert ssim(frames, frames) == pytest.approx(1.0, abs=1e-4)
    assert ssim(frames, torch.rand(3, 16, 16, 3)) < 0.2
    assert psnr(torch.tensor([0.0, 1.1]), torch.tensor([0.0, 1.0])) == pytest.approx(23.01, abs=0.01)
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


@pytest.mark.slow
def test_the_table_of_quality_runs_on_a_cpu(tmp_path):
    pytest.importorskip("diffusers", reason="make test-video")
    file = tmp_path / "quality.json"
    command = [sys.executable, "benchmarks/video/quality.py", "--tiny", "--seconds", "2", "--densities", "0.2"]
    subprocess.run([*command, "--json", str(file)], check=True, timeout=300, cwd=ROOT)
    rows = json.loads(file.read_text())["rows"]
    methods = [
        "pooled top-k",
        "mean-query top-k",
        "shared residuals",
        "window",
        "radial decay",
        "spatial or temporal",
        "tuned",
    ]
    assert [row["method"] for row in rows] == methods
    assert rows[-1]["density"] <= rows[0]["density"] + 0.01
