# SPDX-License-Identifier: Apache-2.0
"""Let Triton's interpreter patch `triton.language` once a launch.

It does so again in each call of a device function, which takes a third of its time. Only what the launch left
unpatched is patched here then.
"""

from triton import language
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_by_launch: set[object] = set()  # undone when the launch ends
_by_calls: set[object] = set()  # never undone


def _languages(function):
    found = function.__globals__.values()
    return {module for module in (language, language.core) if any(value is module for value in found)}


def _patch_launch(function):
    _by_launch.clear()
    _by_launch.update(_languages(function))
    return _patch(function)


def _call(self, *args, **kwargs):
    missing = _languages(self.fn) - _by_launch - _by_calls
    if missing:
        _patch(self.fn)
        _by_calls.update(missing)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


if hasattr(interpreter, "_LangPatchScope"):
    interpreter._patch_lang = _patch_launch
    interpreter.InterpretedFunction.__call__ = _call
