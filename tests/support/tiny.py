# SPDX-License-Identifier: Apache-2.0
"""Tiny random Llamas: one whose attention is not flat, and one with its own tokenizer, saved as transformers does."""

from pathlib import Path

import torch

TEXT = "\n\n".join(
    f"Section {i}. The quick brown fox number {i} jumps over the lazy dog, and {i * 7919 % 1000} others watch it."
    for i in range(400)
)


def llama():
    """Return a Llama of two layers: six q heads of 16 on two kv heads, 64 tokens in the vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tokens(*shape, seed=1):
    """Return random token ids."""
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))


def save_tiny_model(folder: Path, *, max_positions: int = 1024) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT[:20_000]], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
