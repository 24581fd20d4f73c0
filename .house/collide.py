import ast
import subprocess
from pathlib import Path

R=Path('/work/main'); rows={}
for l in open('/tmp/refactor/m.tsv'):
    if l.startswith('#') or '\t' not in l: continue
    a,b=l.strip().split('\t')[:2]
    if a.endswith('.py'): rows[a]=b
files=subprocess.run(["git","-C",str(R),"ls-files","*.py"],capture_output=True,text=True).stdout.split()
mods={f[len("globaltensor/"):] for f in files if f.startswith("globaltensor/")}
for f in files:
    t=ast.parse((R/f).read_text()); pk=f.split("/")[:-1]
    names={}
    for n in ast.walk(t):
        if isinstance(n,ast.ImportFrom):
            base=(pk[:len(pk)-n.level+1]+(n.module.split(".") if n.module else [])) if n.level else (n.module or "").split(".")
            if base[:1]!=["globaltensor"]: continue
            for a in n.names:
                rel="/".join([*base[1:],a.name])+".py"
                if rel in mods and rel in rows and a.asname is None:
                    new=Path(rows[rel]).stem
                    if new!=a.name: names[a.name]=new
    if not names: continue
    for n in ast.walk(t):
        if isinstance(n,(ast.FunctionDef,ast.Lambda)):
            args=n.args
            for a in [*args.posonlyargs,*args.args,*args.kwonlyargs]:
                if a.arg in names: print(f,n.lineno,getattr(n,'name','lambda'),'arg',a.arg,'->',names[a.arg])
        if isinstance(n,ast.Name) and isinstance(n.ctx,ast.Store) and n.id in names: print(f,n.lineno,'store',n.id)
        if isinstance(n,ast.alias): pass
    # names imported that are both function via __init__ and module
