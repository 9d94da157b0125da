# SPDX-License-Identifier: Apache-2.0
"""The parts of a policy besides its rules: the model that it is for, its tolerances, the machine and the evidence."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, Strict, model_validator

from dynaxx.errors import PolicyError
from dynaxx.policy.document import Document, Int, Positive

Number = Annotated[float, Strict()]
MAX_HEADS = 65_536  # q heads of all layers; the largest models have 16,000
Size = Annotated[int, Strict(), Field(ge=1, le=MAX_HEADS)]


class ModelFacts(Document):
    """The shape that a model must have for the policy to apply to it."""

    model_type: str  # transformers' config.model_type of the text model, e.g. "llama"
    layers: Size
    q_heads: Size
    kv_heads: Size
    head_dim: Size

    @classmethod
    def of(cls, config: Any) -> ModelFacts:
        """Return the facts of a transformers config, or of its text decoder if it has several parts."""
        config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        heads, layer = config.num_attention_heads, _full_layer(config)
        latent = getattr(config, "kv_lora_rank", None)  # latent attention has one key per query head, whatever it names
        return cls(
            model_type=config.model_type,
            layers=config.num_hidden_layers,
            q_heads=heads,
            kv_heads=heads if latent else getattr(layer, "num_key_value_heads", None) or heads,
            head_dim=getattr(layer, "head_dim", None) or config.hidden_size // heads,
        )

    def check(self, found: ModelFacts) -> None:
        """Compare with the facts of the model that the policy is to run in.

        Raises:
            PolicyError: the policy is for another model.
        """
        for name in ModelFacts.model_fields:
            ours, theirs = getattr(self, name), getattr(found, name)
            if ours != theirs:
                raise PolicyError(
                    f"`model.{name}` is {ours!r} in the policy and {theirs!r} in the model: "
                    "the policy is for another model; tune a policy for this model"
                )

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelFacts:
        if self.q_heads % self.kv_heads:
            raise ValueError(f"`q_heads` must be a multiple of `kv_heads`, got {self.q_heads} and {self.kv_heads}")
        if self.layers * self.q_heads > MAX_HEADS:
            raise ValueError(
                f"`layers` times `q_heads` must be at most {MAX_HEADS:,}, got {self.layers} and {self.q_heads}"
            )
        return self


def _full_layer(config: Any) -> Any:
    """Return the config of a layer that sees the whole sequence, if layers differ in their heads (Gemma 4)."""
    kinds = getattr(config, "layer_types", None) or ()
    each = getattr(config, "per_layer_config", None)
    return config if each is None or "full_attention" not in kinds else each[list(kinds).index("full_attention")]


class Tolerances(Document):
    """Limits that `dynaxx validate` checks; None means not checked.

    Args:
        perplexity_ratio: largest ratio of sparse to dense perplexity on held-out text.
        kl: largest mean KL(dense || sparse) of next-token distributions, in nats.
        top1_agreement: smallest share of tokens with the same most likely next token.
        logits_mean_error: largest mean absolute difference of logits.
        task_logprob_drop: largest loss in nats per answer token on any generated retrieval task.
        repetition_increase: largest rise of the share of repeated 4-grams in generated text.
        slowdown: largest ratio of sparse to dense seconds at any measured length.
    """

    perplexity_ratio: Number | None = 1.01
    kl: Number | None = None
    top1_agreement: Annotated[Number, Field(ge=0, le=1)] | None = None
    logits_mean_error: Number | None = None
    task_logprob_drop: Number | None = 0.1
    repetition_increase: Number | None = 0.1
    slowdown: Number | None = 1.03


class MeasuredOn(Document):
    """The machine and the versions behind `dense_below` and every figure in the evidence."""

    device: str  # "cpu", "cuda"
    hardware: str = ""  # name of the processor or GPU
    threads: Positive | None = None
    dtype: str = ""
    versions: dict[str, str] = Field(default_factory=dict)


class Evidence(Document):
    """One measurement: what was measured, the command, and the figures."""

    what: str
    command: str
    values: dict[str, Annotated[bool, Strict()] | Int | Number | str | None] = Field(default_factory=dict)
