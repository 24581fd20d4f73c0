import ast
import subprocess
import sys
from pathlib import Path

R=Path(sys.argv[1])
files=subprocess.run(["git","-C",str(R),"ls-files","*.py"],capture_output=True,text=True).stdout.split()
mods={}
for f in files:
    if f.startswith("globaltensor"):
        p=f[:-3].split("/"); p=p[:-1] if p[-1]=="__init__" else p
        mods[".".join(p)]=f
trees={f:ast.parse((R/f).read_text()) for f in files}
def attrs(m):
    t=trees[mods[m]]; out=set()
    for n in ast.walk(t):
        if isinstance(n,(ast.FunctionDef,ast.ClassDef)): out.add(n.name)
        if isinstance(n,(ast.Import,ast.ImportFrom)): out.update((a.asname or a.name).split(".")[0] for a in n.names)
        if isinstance(n,ast.Name) and isinstance(n.ctx,ast.Store): out.add(n.id)
    return out
A={m:attrs(m) for m in mods}
subs={m:{k.split(".")[-1] for k in mods if k.rpartition(".")[0]==m} for m in mods}
for f,t in trees.items():
    pk=f.split("/")[:-1]; bound={}
    for n in ast.walk(t):
        if isinstance(n,ast.ImportFrom):
            base=".".join(pk[:len(pk)-n.level+1]+(n.module.split(".") if n.module else [])) if n.level else (n.module or "")
            if not base.startswith("globaltensor"): continue
            if base not in mods: print(f,n.lineno,"no module",base); continue
            for a in n.names:
                full=f"{base}.{a.name}"
                if full in mods:
                    # package attribute may be a function of that name re-exported
                    init=trees[mods[base]]
                    re_ex=any(isinstance(x,ast.ImportFrom) and any((y.asname or y.name)==a.name and x.module is not None for y in x.names) for x in init.body)
                    if not (mods[base].endswith("__init__.py") and re_ex): bound[a.asname or a.name]=full
                elif a.name!="*" and a.name not in A[base] and a.name not in subs.get(base,()) and base!="globaltensor": print(f,n.lineno,"no name",base,a.name)
    stores={n.id for n in ast.walk(t) if isinstance(n,ast.Name) and isinstance(n.ctx,ast.Store)}|{n.arg for n in ast.walk(t) if isinstance(n,ast.arg)}
    for n in ast.walk(t):
        if isinstance(n,ast.Call) and isinstance(n.func,ast.Name) and n.func.id in bound and n.func.id not in stores: print(f,n.lineno,"calls module",bound[n.func.id])
        if isinstance(n,ast.Attribute) and isinstance(n.value,ast.Name) and n.value.id in bound and n.value.id not in stores:
            m=bound[n.value.id]
            if n.attr not in A[m] and n.attr not in subs.get(m,()) and not n.attr.startswith("__"): print(f,n.lineno,"no attribute",m,n.attr)
