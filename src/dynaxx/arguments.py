# SPDX-License-Identifier: Apache-2.0
"""Read numbers, and name the argument of a wrong type. The search for that one runs only after a call has failed."""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import inspect
import numbers
import types
import typing
from operator import index
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

T = TypeVar("T")
DISTRIBUTED = "a distributed tensor; pass its to_local() where that has whole sequences, or use dynaxx.distributed"
COMPUTED = frozenset(
    (*(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool),
     *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
)  # fmt: skip
META = "one on the meta device, which has no values to read"
NESTED = "a nested tensor; pass values() of a jagged one as packed tokens, and its offsets() as cumulative lengths"


def typed(target: T) -> T:
    """Decorate a public function or class, so that a call that fails over an argument of a wrong type names it.

    Tensors with a pending sign (`is_neg`, as the imaginary part of a conjugate) and zeros without memory, as tangents
    may be, are resolved, because kernels read their memory.

    Raises:
        TypeError: an argument does not fit its annotation. It is raised from the error of the call, unless that error
            is a ValueError or TypeError that names an argument already.
    """
    function: Any = target
    if isinstance(target, type):
        function.__init__ = typed(function.__init__)
        return target

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return function(*args, **kwargs)
        if any([isinstance(x, Tensor) and (x.is_neg() or x._is_zerotensor()) for x in (*args, *kwargs.values())]):
            args, kwargs = tuple(map(resolved, args)), {name: resolved(x) for name, x in kwargs.items()}
        try:
            return function(*args, **kwargs)
        except Exception as error:
            complaint = _complaint(function, error, args, kwargs)
            if complaint is None:
                raise
            raise TypeError(complaint) from error

    return cast(T, call)


def resolved(x: Any) -> Any:
    """Return a tensor whose memory has its values, or any other value itself."""
    if not isinstance(x, Tensor):
        return x
    return x.clone() if x._is_zerotensor() else x.resolve_neg()


def number(name: str, value: object) -> float:
    """Return an argument as a float.

    Raises:
        TypeError: the argument is not a real number, or is a tensor whose gradient, tangent or value would be lost.
    """
    if isinstance(value, Tensor):
        _refuse_lost(name, value)
    if isinstance(value, str | bytes) or _is_bool(value):
        raise TypeError(f"`{name}` must be a number, got {value!r}")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]
    except (TypeError, RuntimeError):
        raise TypeError(f"`{name}` must be a number, got {described(value)}") from None


def as_integer(name: str, value: object) -> int:
    """Convert an integer of any type, such as numpy's, to `int`; raise TypeError for floats, bools and strings."""
    if not _is_bool(value):
        with contextlib.suppress(TypeError):
            return index(value)  # type: ignore[arg-type]
    raise TypeError(f"`{name}` must be an integer, got {value!r}")


def _is_bool(value: object) -> bool:
    """Return whether a value is a bool of Python, NumPy or torch, which would count as 0 or 1."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _refuse_lost(name: str, value: Tensor) -> None:
    """Raise TypeError for a tensor that is more than its number: one with a gradient, or one that is recorded.

    Gradients are refused under `torch.no_grad` too, in which operations without gradients run themselves.
    """
    instead = (
        f"multiply q by it and pass 1.0 as `{name}`" if "scale" in name else "compute with dense attention to train it"
    )
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        why = f"a tensor in a transform of torch.func, which would drop it; {instead}"
    elif value.requires_grad:
        why = f"a tensor that requires a gradient, which would be lost; pass float(`{name}`.detach()), or {instead}"
    elif forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
        why = f"a tensor with a tangent, which would be lost; pass float(`{name}`.detach()), or {instead}"
    elif torch._C._get_tracing_state() is not None:
        why = f"a tensor, which torch.jit.trace would record as a constant; {instead}"
    elif value.numel() != 1:
        why = f"a tensor of shape {tuple(value.shape)}"
    else:
        return
    raise TypeError(f"`{name}` must be a number, got {why}")


def _complaint(function: Any, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return a message about the first argument that does not fit, or None if all fit or the error names it already."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # an argument is missing or unknown, and Python's own error says which
        return None
    hints = _hints(inspect.unwrap(function))
    for name, x in given.items():
        kind = _other_kind(x, error) if isinstance(x, Tensor) else None
        if kind is not None and kind not in str(error):
            return f"`{name}` must be a plain tensor, got {kind}"
    if isinstance(error, TypeError | ValueError) and any(f"`{name}`" in str(error) for name in given):
        return None
    for name, value in given.items():
        if name in hints and not fits(value, hints[name]):
            if isinstance(value, Tensor) and value.is_meta:
                return f"`{name}` must be a plain tensor, got {META}"
            wanted = function.__annotations__[name]
            wanted = wanted if isinstance(wanted, str) else getattr(wanted, "__name__", str(wanted))
            size = " of at most 64 bits" if "int" in wanted and _is_wide(value) else ""
            return f"`{name}` must be {wanted}{size}, got {described(value)}"
    return None


def _other_kind(x: Tensor, error: Exception) -> str | None:
    """Return what a tensor is, if it is of a kind that explains the error of an operation of torch, else None."""
    if x.is_nested:
        return NESTED
    if not isinstance(error, RuntimeError) or "memory" in str(error):
        return None
    if x.is_meta and "meta" in str(error):
        return META
    if isinstance(error, NotImplementedError) and "not implemented for" not in str(error):  # a refusal in words
        return None
    kind = type(x)
    if any(each.__name__ == "DTensor" for each in kind.__mro__):
        return DISTRIBUTED
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a {kind.__name__}, which need not have values that can be read"
    return None if x.dtype in COMPUTED else f"one of {x.dtype}, with which torch does not compute"


def _hints(function: Any) -> dict[str, Any]:
    """Return the annotations that can be evaluated. Names imported under `TYPE_CHECKING` cannot."""
    found = {}
    for name, hint in function.__annotations__.items():
        with contextlib.suppress(NameError):
            found[name] = eval(hint, function.__globals__) if isinstance(hint, str) else hint
    return found


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value fits an annotation. True for annotations that are not understood."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if origin is typing.Annotated:
        return fits(value, of[0])
    if origin in (typing.Union, types.UnionType):
        if torch.device in of and isinstance(value, str):
            return _is_device(value)
        return any(fits(value, each) for each in of)
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in of)
    if origin is collections.abc.Callable:
        return callable(value)
    if isinstance(origin, type):
        return isinstance(value, origin) and not isinstance(value, str | bytes) and _holds(value, origin, of)
    if hint is None or hint is type(None):
        return value is None
    if hint is Tensor:
        return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_meta or value.is_nested)
    if hint is int:
        return (
            isinstance(value, numbers.Integral | torch.SymInt) and not isinstance(value, bool) and not _is_wide(value)
        )
    if hint is float:
        single = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()  # see `number`
        return not _is_bool(value) and (single or isinstance(value, numbers.Real | torch.SymInt | torch.SymFloat))
    if hint is bool:
        return isinstance(value, numbers.Integral | torch.SymBool)
    if getattr(hint, "_is_protocol", False) and not getattr(hint, "_is_runtime_protocol", False):
        return True
    return not isinstance(hint, type) or isinstance(value, hint)


def _holds(value: Any, origin: type, of: tuple[Any, ...]) -> bool:
    """Return whether the items of a container fit its annotation."""
    if issubclass(origin, tuple) and of and of[-1] is not Ellipsis:
        return len(value) == len(of) and all(map(fits, value, of))
    if issubclass(origin, collections.abc.Sequence) and of:
        return all(fits(each, of[0]) for each in value)
    return True


def _is_wide(value: Any) -> bool:
    """Return whether an integer, or one of a list, needs more than 64 bits."""
    if isinstance(value, list | tuple):
        return any(map(_is_wide, value))
    return isinstance(value, numbers.Integral | torch.SymInt) and not -(2**63) <= int(value) < 2**63


def _is_device(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def described(value: Any) -> str:
    """Return a value for an error message: a number or text itself, of anything else its type."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return NESTED
        return f"a tensor of {value.dtype} {tuple(value.shape)} on {value.device}, {value.layout}"
    if value is None or isinstance(value, str | numbers.Number):
        return repr(value)[:80]
    if isinstance(value, tuple | list) and value:
        return f"{type(value).__name__} of {', '.join(sorted({type(each).__name__ for each in value}))}"
    return type(value).__name__
