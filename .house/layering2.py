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
NAMES={"kernel_message","collective_message","refuse_transforms"}
for p in G.rglob("*.py"):
    t=p.read_text()
    for m in list(re.finditer(r"from (\.+)(?:_tensor\.)?global_tensor import ([^\n(]*)\n",t)):
        names=[n.strip() for n in m.group(2).split(",")]
        mine=[n for n in names if n in NAMES]
        if not mine: continue
        rest=[n for n in names if n not in NAMES]
        dots="."*len(p.relative_to(G).parts)
        t=t.replace(m.group(0),(m.group(0).replace(m.group(2),", ".join(rest)) if rest else "")+f"from {dots}_base.refusals import {', '.join(mine)}\n")
    p.write_text(t)
s=rd("_tensor/global_tensor.py")
s=re.sub(r'__all__ = \[[^\]]*\]','__all__ = ["ORDINARY", "REFUSED", "SEEN_AS", "GlobalTensor", "Memory", "SlottedGlobalTensor"]',s,1)
s=s.replace("from .._base import torch_private\n","from .._base import torch_private\nfrom .._base.refusals import collective_message, kernel_message\n",1)
wr("_tensor/global_tensor.py",s)
for p in ("graph/module_state.py","graph/capture/autograd_recorder.py","_ops/methods.py"):
    t=rd(p); print(p,re.findall(r".*import.*backward.*|.*import.*gradients.*",t))
