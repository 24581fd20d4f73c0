import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT=Path(sys.argv[1])/"globaltensor"
L=[("errors","_base"),("sharding","cluster"),("distributed","comm"),("boxing",),("_tensor",),("_ops",),("amp",),("optim",),("parallel",),("graph",),("auto",),("nn","utils","v0","sbp","pipeline","__init__","cli","__main__")]
rank={n:i for i,t in enumerate(L) for n in t}
mods={}
for p in ROOT.rglob("*.py"):
    parts=p.relative_to(ROOT).with_suffix("").parts
    if parts[-1]=="__init__": parts=parts[:-1]
    mods[".".join(parts)]=p
up=defaultdict(list)
for m,p in sorted(mods.items()):
    pk=["globaltensor",*p.relative_to(ROOT).parts[:-1]]
    me=p.relative_to(ROOT).parts[0].removesuffix(".py")
    for n in ast.walk(ast.parse(p.read_text())):
        if isinstance(n,ast.ImportFrom) and n.level:
            base=pk[:len(pk)-n.level+1]+(n.module.split(".") if n.module else [])
            for a in n.names:
                full=[*base,a.name][1:]
                o=full[0] if full else "__init__"
                if o not in rank: o="__init__"
                if o!=me and rank[o]>=rank.get(me,99):
                    up[(me,o)].append(f"{p.relative_to(ROOT)}:{n.lineno} {'.'.join(base[1:])} {a.name}")
for k,v in sorted(up.items()):
    print(k,len(v))
    for x in v: print("    ",x)
