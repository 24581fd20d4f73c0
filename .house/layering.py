import re
from pathlib import Path

G=Path("globaltensor")
def rd(p): return (G/p).read_text()
def wr(p,s): (G/p).write_text(s)
def sub(p,*prs):
    s=rd(p)
    for a,b in prs:
        assert a in s,(p,a)
        s=s.replace(a,b)
    wr(p,s)
# (1) _tensor/grad.py
s=rd("_ops/backward.py")
a=s.index("# ---------------------------------------------------------------------------------------------------------------- .grad\n")
b=s.index("# ---------------------------------------------------------------------------------------------------------------- starting a backward pass\n")
body=s[a:b].split("\n",3)[3]
wr("_tensor/grad.py",'''"""The ``.grad`` attribute of global tensors: read, assigned, and laid out as the tensor is."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .._base.overridable import visible
from ..boxing import box
from ..errors import SbpError
from ..sharding.spec import Spec
from .global_tensor import GlobalTensor
from .history import record

__all__ = ["get_grad", "local_grad", "set_grad"]


'''+body.rstrip()+"\n")
s=s[:a]+s[b:].split("\n",1)[1].lstrip("\n")
s=s.replace('__all__ = ["backward", "get_grad", "grad", "local_grad", "run_owing", "set_grad"]','__all__ = ["backward", "grad", "run_owing"]')
s=s.replace("from .dispatch import HANDLERS, record\n","from .._tensor.history import record\nfrom .dispatch import HANDLERS\n")
s=s.replace('''"""Gradients of global tensors: how a backward pass starts, and how what it brings is read.''','''"""Backward passes: how one starts from a global tensor, and what it brings to others than leaves.''')
wr("_ops/backward.py",s)
# (2) history
s=rd("_ops/dispatch.py")
i=s.index("def record(what: str"); j=s.index("\n\n\n",i)
func=s[i:j]
s=s[:i]+s[j+3:]
s=s.replace('"lies_at", "record", "rule"','"lies_at", "rule"')
wr("_ops/dispatch.py",s)
wr("_tensor/history.py",'''"""What a rank has run on global tensors, for the comparison with the other ranks (distributed/divergence.py)."""

from __future__ import annotations

from ..distributed.world import world
from .global_tensor import GlobalTensor

__all__ = ["record"]


'''+func+"\n")
for p in G.rglob("*.py"):
    t=p.read_text()
    m=re.search(r"from (\.+)((?:_ops\.)?dispatch) import ([^\n(]*\brecord\b[^\n]*)\n",t)
    if m and p.name!="dispatch.py":
        names=[n.strip() for n in m.group(3).split(",")]
        rest=[n for n in names if n!="record"]
        dots="."*( {"_ops":2,"_tensor":1}.get(p.relative_to(G).parts[0],2)+len(p.relative_to(G).parts)-2)
        target=f"from {dots}_tensor.history import record\n" if p.relative_to(G).parts[0]!="_tensor" else f"from {dots}history import record\n"
        new=(f"from {m.group(1)}{m.group(2)} import {', '.join(rest)}\n" if rest else "")+target
        t=t.replace(m.group(0),new); p.write_text(t); print("record",p)
sub("optim/local_step.py",("from .._ops.backward import local_grad","from .._tensor.grad import local_grad"))
sub("_tensor/set_data.py",("from .._ops.backward import get_grad, set_grad","from .grad import get_grad, set_grad"))
# (3) refusals below the function level
s=rd("_tensor/global_tensor.py")
i=s.index("def kernel_message("); tail=s[i:]
wr("_tensor/global_tensor.py",s[:i].rstrip()+"\n")
wr("_base/refusals.py",'''"""What is said where a global tensor comes below torch's functions: a kernel, a collective of torch.distributed, a transform of torch.func."""

from __future__ import annotations

from ..errors import KernelError
from . import torch_private

__all__ = ["collective_message", "kernel_message", "refuse_transforms"]


'''+tail.rstrip()+"\n")
