"""Torch's private names about torch.compile."""

from __future__ import annotations

import threading
from typing import Any

from ..patches import patch

__all__ = ["watch_compiler"]


class _Uncompiled(threading.local):
    # True if this thread has just run uncompiled a function that was to be compiled with
    # fullgraph=True
    whole = False


_uncompiled = _Uncompiled()


def watch_compiler(left: Any, meets: Any, met: Any, tell: Any, refusal: str) -> None:
    """Ask before and while torch.compile traces a function.

    There is no public way to keep the compiler away from a kind of tensors (checked with torch
    2.13).

    ``left(code, variables, outside)``: return True if a function is to run uncompiled, with all
    that it calls. ``meets(value)``: return True if the tracer must not handle this value.
    ``met(code)``: return True if the tracer met such a value in the code that it has just traced.
    ``tell(whole)`` is called before a function runs uncompiled. ``whole``: its caller wants all of
    it compiled, or an error. ``refusal``: the tracer's message, which torch.export shows.
    """

    def ask_before(convert: Any) -> Any:
        from torch._dynamo import convert_frame, types

        action = types.FrameAction
        eagerly = types.ConvertFrameReturn(
            frame_exec_strategy=types.FrameExecStrategy(action.SKIP, action.SKIP),
            apply_to_code=False,
        )

        def call(self: Any, frame: Any, *args: Any) -> Any:
            code = frame.f_code
            if not left(code, frame.f_locals, frame.f_globals):
                met(code)  # clear what a failed trace left
                try:
                    out = convert(self, frame, *args)
                except Exception:
                    if not met(code):
                        raise
                else:
                    if not met(code):
                        return out
            whole = isinstance(self._torchdynamo_orig_backend, convert_frame.ConvertFrameAssert)
            tell(whole)
            _uncompiled.whole = whole
            return eagerly

        return call

    def ask_after(count: Any) -> Any:
        # By it a call with fullgraph=True checks whether anything was compiled (2.13).
        def counted(n: int) -> int:
            found, left = count(n), _uncompiled.whole
            _uncompiled.whole = False
            return 1 if n < 0 and left else found

        return counted

    def ask_within(build: Any) -> Any:
        from torch._dynamo.exc import Unsupported

        def call(self: Any, value: Any) -> Any:
            if meets(value):
                raise Unsupported(refusal, skip_frame=True)
            return build(self, value)

        return call

    home = "torch._dynamo"
    patch(f"{home}.eval_frame:set_fullgraph_compiled_frame_count", ask_after)
    patch(f"{home}.convert_frame:CatchErrorsWrapper.__call__", ask_before)
    patch(f"{home}.variables.builder:VariableBuilder.__call__", ask_within)
