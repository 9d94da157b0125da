# SPDX-License-Identifier: Apache-2.0
"""Manifests of exported models are read whole or refused with the file and the fix; tokenizers lie beside them."""

import json

import pytest

from dynaxx.engines.portable.manifest import copy_tokenizer, read_manifest

FIELDS = {"form": str, "sparse_from": int, "graphs": list}
WHOLE = {"format": "dynaxx.onnx", "version": 1, "form": "portable", "sparse_from": 512, "graphs": ["prefill"]}


def read(folder):
    return read_manifest(folder, "onnx", 1, FIELDS)


def test_a_file_cut_at_any_byte_is_refused(tmp_path):
    path, text = tmp_path / "dynaxx.json", json.dumps(WHOLE, indent=1)
    path.write_text(text)
    assert read(tmp_path) == WHOLE
    for length in range(len(text)):
        path.write_text(text[:length])
        with pytest.raises(ValueError, match=r"dynaxx.json .*: export the model again with dynaxx export"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must have the format dynaxx.onnx, got no object"),
        ("[" * 100_000, "must nest"),
        (json.dumps({**WHOLE, "format": "dynaxx.openvino\x1b"}), r"got dynaxx.openvino\\x1b: export"),
        (json.dumps({**WHOLE, "version": 2}), "newer dynaxx, so upgrade"),
        (json.dumps({**WHOLE, "version": "1"}), "`version` in .* must be of type int: export"),
        (json.dumps({**WHOLE, "form": None}), r"`form` in .* must be of type str: export"),
        (json.dumps({**WHOLE, "sparse_from": True}), "`sparse_from` in .* must be of type int"),
        (json.dumps({**WHOLE, "sparse_from": 1e99}), "`sparse_from` in .* must be of type int"),
    ],
)
def test_invalid_manifests_are_refused(text, message, tmp_path):
    (tmp_path / "dynaxx.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_a_folder_without_one_says_what_to_give(tmp_path):
    with pytest.raises(FileNotFoundError, match="is missing: give a folder that dynaxx export --format onnx wrote"):
        read(tmp_path)


def test_a_tokenizer_and_configs_come_along_and_no_weights(tmp_path):
    kept = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
        "merges.txt",
    }
    kept |= {"added_tokens.json", "special_tokens_map.json", "tokenizer.model", "chat_template.jinja"}
    source, out = tmp_path / "model", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    for name in (*kept, "model.safetensors", "modeling_own.py"):
        (source / name).write_text(name)
    copy_tokenizer(source, out)
    assert {file.name: file.read_text() for file in out.iterdir()} == {name: name for name in kept}
    with pytest.raises(ValueError, match="`tokenizer` must be a folder that save_pretrained wrote"):
        copy_tokenizer(tmp_path, out)
