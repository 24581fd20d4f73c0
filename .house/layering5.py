import re
import subprocess
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
sub("distributed/run/serialize.py",("from collections.abc import Sequence","from collections.abc import Callable, Sequence"),('"pack", "save"','"pack", "register_wrapper", "save"'))
sub("sharding/placement.py",("from collections.abc import Mapping, Sequence","from collections.abc import Callable, Mapping, Sequence"),('"Placement", "placement"]','"Placement", "placement", "register_job_size"]'))
s=rd("distributed/env.py")
s=s.replace("from ..sharding.placement import Placement\n","from ..sharding.placement import Placement, register_job_size\n")
s=s.rstrip()+"\n\n\nregister_job_size(lambda: (get_world_size(), get_node_size()))\n"
wr("distributed/env.py",s)
# methods.install registers the wrapper
s=rd("_ops/methods.py")
s=s.replace("    storage.install()\n","    storage.install()\n    register_wrapper(GlobalTensor.wrap)\n")
s=s.replace("from ..distributed.world import placeholder, world\n","from ..distributed.run.serialize import register_wrapper\nfrom ..distributed.world import placeholder, world\n")
wr("_ops/methods.py",s)
# pytree
subprocess.run(["git","mv","globaltensor/graph/pytree.py","globaltensor/_base/pytree.py"],check=True)
t=rd("_base/pytree.py")
t=t.replace('"""What a graph takes and gives: nests of tuples, lists, dicts, dataclasses and other objects that hold tensors (a batch, a model\'s output, a cache)."""','''"""Trees of values that hold tensors: the arguments of a call, and what a graph takes and gives.

Arguments of a call are tuples, lists and dicts (`tensors_in`, `replaced`): these two run at every call that no plan runs directly. A graph also takes
dataclasses and other objects (a batch, a model's output, a cache): `object_tensors`, `replaced_in_objects`, `skeleton`.
"""''')
t=re.sub(r"\btensors_in\b(?!`, `replaced`)","object_tensors",t)
t=t.replace("def replaced(","def replaced_in_objects(")
t=re.sub(r"__all__ = .*",'__all__ = ["object_tensors", "replaced", "replaced_in_objects", "skeleton", "tensors_in"]',t)
c=rd("_ops/call_plan.py")
i=c.index("def tensors_in("); j=c.index("def _named("); k=c.index("\n\n\n",j)+3
func=c[i:k]
c=c[:i]+c[k:]
print(func[-600:])
wr("_ops/call_plan.py",c)
i=t.index("_PLAIN = ")
t=t[:i].rstrip()+"\n\n\n"+func.rstrip()+"\n\n\n"+t[i:]
wr("_base/pytree.py",t)
GRAPH=[]
for p in [*G.rglob("*.py"),*Path("tests").rglob("*.py"),*Path("benchmarks").rglob("*.py")]:
    t=p.read_text(); o=t
    # importers of the graph's walker
    m=re.search(r"from (\.+|globaltensor\.)((?:graph\.)?pytree) import ([^\n(]*)\n",t)
    if m and p.name!="pytree.py":
        names=[n.strip() for n in m.group(3).split(",")]
        new={"tensors_in":"object_tensors","replaced":"replaced_in_objects","skeleton":"skeleton"}
        for n in names:
            if new[n]!=n: t=re.sub(rf"(?<![\w.`]){n}\b(?=\()",new[n],t)
        dots="."*len(p.relative_to(G).parts) if p.is_relative_to(G) else "globaltensor."
        t=t.replace(m.group(0),f"from {dots}_base.pytree import {', '.join(new[n] for n in names)}\n")
        GRAPH.append(str(p))
    for m in list(re.finditer(r"from (\.+|globaltensor\.)((?:_ops\.)?call_plan) import ([^\n(]*)\n",t)):
        names=[n.strip() for n in m.group(3).split(",")]
        mine=[n for n in names if n in ("tensors_in","replaced")]
        if not mine: continue
        rest=[n for n in names if n not in mine]
        dots="."*len(p.relative_to(G).parts) if p.is_relative_to(G) else "globaltensor."
        t=t.replace(m.group(0),(m.group(0).replace(m.group(3),", ".join(rest)) if rest else "")+f"from {dots}_base.pytree import {', '.join(mine)}\n")
    if t!=o: p.write_text(t)
print(GRAPH)
c=rd("_ops/call_plan.py")
c=c.replace('"name_of", "replaced", "shared", "tensors_in", "wrapped_whole"','"name_of", "shared", "wrapped_whole"')
c=c.replace("from .._base import torch_private\n","from .._base import torch_private\nfrom .._base.pytree import replaced, tensors_in\n",1)
wr("_ops/call_plan.py",c)
