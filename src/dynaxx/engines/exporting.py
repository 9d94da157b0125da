# SPDX-License-Identifier: Apache-2.0
"""What exports to several engines share: packages to import, options of the command, and checks of the model."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from dynaxx.policy import Policy


def imported(name: str, fix: str, oldest: tuple[int, int] = (0, 0)) -> Any:
    """Return a package of an engine.

    Args:
        name: the package.
        fix: the command that installs it.
        oldest: the oldest version that can be used, as (major, minor).

    Raises:
        ImportError: it is not installed, or too old; the message has the fix.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} cannot be imported ({error}): {fix}", name=name) from error
    if oldest > (0, 0) and tuple(map(int, re.findall(r"\d+", module.__version__)[:2])) < oldest:
        wanted = ".".join(map(str, oldest))
        raise ImportError(f"{name} must be >= {wanted}, got {module.__version__}: pip install -U {name}", name=name)
    return module


class Option(NamedTuple):
    """An option of `dynaxx export --option`."""

    wanted: str  # its form in words
    pattern: str  # a regular expression for its text
    read: Callable[[str], Any] = str  # returns the value of such a text


def one_of(*words: str) -> Option:
    """Return an option that is one of some words."""
    return Option(f"{', '.join(words[:-1])} or {words[-1]}", "|".join(words))


NUMBER = Option("a number", r"\d{1,9}", int)
TEXT = Option("text", ".*")
FORM, LOGITS = one_of("auto", "portable", "custom"), one_of("last", "all")


def read_options(given: Mapping[str, str], options: Mapping[str, Option]) -> dict[str, Any]:
    """Return the values of options that were given as text.

    Raises:
        ValueError: an option is unknown, or has another form.
    """
    values = {}
    for name, text in given.items():
        if name not in options:
            raise ValueError(f"--option {name} is not one of {', '.join(options)}")
        if not re.fullmatch(options[name].pattern, text, flags=re.ASCII):
            raise ValueError(f"--option {name} must be {options[name].wanted}, got {text!r}")
        values[name] = options[name].read(text)
    return values


def beyond_settings(policy: Policy, engine: str) -> list[str]:
    """Return what of a policy the settings of an engine cannot say: decode rules, a rollout and a guard."""
    parts = {
        "rules for decoding: take the rules of phase decode out": any(rule.phase == "decode" for rule in policy.rules),
        "rollout: remove `rollout`, or choose by request yourself": policy.rollout != type(policy.rollout)(),
        "guard: remove `guard`": policy.guard is not None,
    }
    return [f"{engine} has no {part}" for part, is_there in parts.items() if is_there]


def check_exportable(model: nn.Module) -> None:
    """Raise ValueError unless a model is in eval mode and on a CPU."""
    if model.training:
        raise ValueError("`model` must be in eval mode, or dropout would be exported: call model.eval()")
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if device != "cpu":
        raise ValueError(f"`model` must be on the CPU to be exported, got {device}: call model.cpu()")
