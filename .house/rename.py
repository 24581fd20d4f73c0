"""Codemod: rename top-level names of modules, and attributes. Usage: rename.py ROOT TABLE
Table rows (tab separated):  def<TAB>globaltensor.mod<TAB>old<TAB>new     attr<TAB>*<TAB>old<TAB>new   (attribute / method / field / keyword everywhere)
attr rows may limit to files whose path contains a text in column 2 (else *)."""
import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(sys.argv[1]).resolve(); PKG = "globaltensor"
defs = defaultdict(dict); attrs = []
for line in Path(sys.argv[2]).read_text().splitlines():
    if not line.strip() or line.startswith("#"): continue
    kind, where, old, new = line.split("\t")[:4]
    if kind == "def": defs[where][old] = new
    elif kind == "attr": attrs.append((where, old, new))
files = [f for f in subprocess.run(["git","-C",str(ROOT),"ls-files","--cached","--others","--exclude-standard"],capture_output=True,text=True).stdout.split() if f.endswith((".py",".md"))]
py = [f for f in files if f.endswith(".py") and (ROOT/f).exists()]
def dotted(f):
    parts = f[:-3].split("/")
    if parts[-1] == "__init__": parts = parts[:-1]
    return ".".join(parts)
MODULES = {dotted(f): f for f in py if f.startswith(PKG)}
for m in defs:
    if m not in MODULES: print("no module", m)

def package_of(f):
    parts = f.split("/")[:-1]
    return parts
def resolve(node, f):
    if node.level == 0: return node.module
    base = package_of(f)
    base = base[: len(base) - node.level + 1]
    return ".".join(base + (node.module.split(".") if node.module else []))

# re-exports: module X that does `from .m import old` makes X.old the same thing
exports = defaultdict(dict)   # module -> name -> (origin module, name)
trees = {}
for f in py:
    try: trees[f] = ast.parse((ROOT/f).read_text())
    except SyntaxError as e: print("syntax", f, e); continue
for f, tree in trees.items():
    if not f.startswith(PKG): continue
    me = dotted(f)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            base = resolve(node, f)
            for a in node.names: exports[me][a.asname or a.name] = (base, a.name)
def origin(mod, name, depth=0):
    if name in defs.get(mod, {}): return defs[mod][name], mod
    if depth < 8 and name in exports.get(mod, {}):
        b, n = exports[mod][name]
        if b and b.startswith(PKG):
            got = origin(b, n, depth+1)
            if got and n == name: return got
    return None

class Scopes(ast.NodeVisitor):
    """collect Name nodes that refer to module-level names"""
    def __init__(self): self.stack=[]; self.found=[]
    def bound(self, node):
        names=set(); glob=set()
        args=node.args if hasattr(node,"args") and isinstance(node.args, ast.arguments) else None
        if args:
            for a in [*args.posonlyargs,*args.args,*args.kwonlyargs,*( [args.vararg] if args.vararg else []),*( [args.kwarg] if args.kwarg else [])]: names.add(a.arg)
        body=node.body if isinstance(node.body,list) else [node.body]
        def walk(n):
            for c in ast.iter_child_nodes(n):
                if isinstance(c,(ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef)):
                    names.add(c.name); continue
                if isinstance(c,ast.Lambda): continue
                if isinstance(c,(ast.ListComp,ast.SetComp,ast.DictComp,ast.GeneratorExp)):
                    for w in ast.walk(c):
                        if isinstance(w,ast.NamedExpr): names.add(w.target.id)
                    continue
                if isinstance(c,ast.Name) and isinstance(c.ctx,(ast.Store,ast.Del)): names.add(c.id)
                if isinstance(c,(ast.Global,)): glob.update(c.names)
                if isinstance(c,(ast.Import,ast.ImportFrom)):
                    for a in c.names: names.add((a.asname or a.name).split(".")[0])
                if isinstance(c,ast.ExceptHandler) and c.name: names.add(c.name)
                if isinstance(c,(ast.MatchAs,ast.MatchStar)) and c.name: names.add(c.name)
                walk(c)
        for b in body:
            class W: pass
            holder=ast.Module(body=[b],type_ignores=[]) if isinstance(b,ast.stmt) else ast.Expression(body=b)
            walk(holder)
        return names-glob
    def visit_FunctionDef(self,node):
        for d in node.decorator_list: self.visit(d)
        for d in [*node.args.defaults,*[k for k in node.args.kw_defaults if k]]: self.visit(d)
        for a in [*node.args.posonlyargs,*node.args.args,*node.args.kwonlyargs,*( [node.args.vararg] if node.args.vararg else []),*( [node.args.kwarg] if node.args.kwarg else [])]:
            if a.annotation: self.visit(a.annotation)
        if node.returns: self.visit(node.returns)
        self.stack.append(("f",self.bound(node)))
        for b in node.body: self.visit(b)
        self.stack.pop()
    visit_AsyncFunctionDef=visit_FunctionDef
    def visit_Lambda(self,node):
        for d in [*node.args.defaults,*[k for k in node.args.kw_defaults if k]]: self.visit(d)
        self.stack.append(("f",self.bound(node))); self.visit(node.body); self.stack.pop()
    def comp(self,node):
        names=set()
        for g in node.generators:
            for w in ast.walk(g.target):
                if isinstance(w,ast.Name): names.add(w.id)
        self.visit(node.generators[0].iter)
        self.stack.append(("f",names))
        for g in node.generators:
            for w in ast.walk(g.target):
                pass
            if g is not node.generators[0]: self.visit(g.iter)
            for i in g.ifs: self.visit(i)
        if isinstance(node,ast.DictComp): self.visit(node.key); self.visit(node.value)
        else: self.visit(node.elt)
        self.stack.pop()
    visit_ListComp=visit_SetComp=visit_DictComp=visit_GeneratorExp=comp
    def visit_ClassDef(self,node):
        for d in [*node.decorator_list,*node.bases,*[k.value for k in node.keywords]]: self.visit(d)
        names=set()
        for b in node.body:
            if isinstance(b,(ast.FunctionDef,ast.ClassDef)): names.add(b.name)
            for w in ([b] if isinstance(b,(ast.Assign,ast.AnnAssign)) else []):
                for t in (w.targets if isinstance(w,ast.Assign) else [w.target]):
                    for n in ast.walk(t):
                        if isinstance(n,ast.Name): names.add(n.id)
        self.stack.append(("c",names))
        for b in node.body: self.visit(b)
        self.stack.pop()
    def visit_Name(self,node):
        for i,(kind,names) in enumerate(reversed(self.stack)):
            if kind=="c" and i>0: continue
            if node.id in names:
                if kind=="c" and isinstance(node.ctx,ast.Load): return
                return
        self.found.append(node)

total=0
for f, tree in trees.items():
    me = dotted(f) if f.startswith(PKG) else None
    text=(ROOT/f).read_text(); lines=[l.encode() for l in text.split("\n")]
    edits=[]  # (line, col, oldlen, new)
    local={}  # name in this file -> new
    if me in defs: local.update(defs[me])
    modules={}  # local name -> module
    inner_imports=[]
    for node in ast.walk(tree):
        if isinstance(node,ast.ImportFrom):
            base=resolve(node,f)
            if not base or not base.startswith(PKG): continue
            for a in node.names:
                full=f"{base}.{a.name}"
                if full in MODULES: modules[a.asname or a.name]=full; continue
                got=origin(base,a.name)
                if got:
                    new=got[0]
                    src=b"\n".join(lines[node.lineno-1:node.end_lineno])
                    # position of alias
                    edits.append((a.lineno-1,a.col_offset,len(a.name),new))
                    if a.asname is None: local[a.name]=new
        elif isinstance(node,ast.Import):
            for a in node.names:
                if a.name in MODULES and a.asname: modules[a.asname]=a.name
    if f.startswith(PKG) or True:
        pass
    s=Scopes(); s.visit(tree)
    # names imported inside functions are 'local' for Scopes; treat file-wide
    inner={ (a.asname or a.name) for n in ast.walk(tree) if isinstance(n,ast.ImportFrom) and n not in tree.body for a in n.names}
    named={id(n) for n in s.found}
    for n in ast.walk(tree):
        if isinstance(n,ast.Name) and n.id in local and (id(n) in named or n.id in inner):
            edits.append((n.lineno-1,n.col_offset,len(n.id),local[n.id]))
        if isinstance(n,(ast.FunctionDef,ast.ClassDef,ast.AsyncFunctionDef)) and n in tree.body and me in defs and n.name in defs[me]:
            ln=n.lineno-1
            m=re.search(rb"\b(def|class)\s+"+re.escape(n.name.encode())+rb"\b",lines[ln])
            edits.append((ln,m.end()-len(n.name.encode()),len(n.name),defs[me][n.name]))
        if isinstance(n,ast.Attribute):
            target=None
            v=n.value
            chain=[]
            while isinstance(v,ast.Attribute): chain.append(v.attr); v=v.value
            if isinstance(v,ast.Name):
                if v.id in modules:
                    mod=".".join([modules[v.id],*reversed(chain)])
                elif v.id==PKG or (v.id=="flow"):
                    mod=".".join([PKG,*reversed(chain)])
                else: mod=None
                if mod and mod in MODULES:
                    got=origin(mod,n.attr)
                    if got: target=got[0]
            if target is None:
                for where,old,new in attrs:
                    if n.attr==old and (where=="*" or where in f): target=new
            if target:
                edits.append((n.end_lineno-1,n.end_col_offset-len(n.attr.encode()),len(n.attr),target))
        if isinstance(n,(ast.FunctionDef,ast.AsyncFunctionDef)):
            for where,old,new in attrs:
                if n.name==old and (where=="*" or where in f):
                    ln=n.lineno-1
                    m=re.search(rb"\bdef\s+"+re.escape(old.encode())+rb"\b",lines[ln])
                    if m: edits.append((ln,m.end()-len(old),len(old),new))
        if isinstance(n,ast.keyword) and n.arg:
            for where,old,new in attrs:
                if where.startswith("kw:") and n.arg==old: edits.append((n.lineno-1,n.col_offset,len(old),new))
        if isinstance(n,ast.AnnAssign) and isinstance(n.target,ast.Name):
            pass
    # class-level fields
    for c in ast.walk(tree):
        if isinstance(c,ast.ClassDef):
            for b in c.body:
                t=b.target if isinstance(b,ast.AnnAssign) else (b.targets[0] if isinstance(b,ast.Assign) and len(b.targets)==1 else None)
                if isinstance(t,ast.Name):
                    for where,old,new in attrs:
                        if t.id==old and (where=="*" or where in f): edits.append((t.lineno-1,t.col_offset,len(old),new))
    # strings: __all__, slots, backticks
    strs={}
    strs.update(local)
    for where,old,new in attrs:
        if where=="*" or where in f: strs[old]=new
    for n in ast.walk(tree):
        if isinstance(n,ast.Constant) and isinstance(n.value,str) and n.value in strs:
            # only in __all__/__slots__-like lists
            edits.append((n.lineno-1,n.col_offset+1,len(n.value),strs[n.value])) if False else None
    for st in ast.walk(tree):
        if isinstance(st,ast.Assign) and len(st.targets)==1 and isinstance(st.targets[0],ast.Name) and st.targets[0].id in ("__all__","__slots__"):
            table=strs if st.targets[0].id=="__all__" else {old:new for where,old,new in attrs if where=="*" or where in f}
            for n in ast.walk(st.value):
                if isinstance(n,ast.Constant) and isinstance(n.value,str) and n.value in table:
                    edits.append((n.lineno-1,n.col_offset+1,len(n.value),table[n.value]))
    seen=set()
    for ln,col,ol,new in sorted(set(edits),reverse=True):
        if (ln,col) in seen: continue
        seen.add((ln,col)); b=lines[ln]
        lines[ln]=b[:col]+new.encode()+b[col+ol:]; total+=1
    text2=b"\n".join(lines).decode()
    if strs:
        def tick(m):
            name=m.group(2)
            return m.group(1)+strs.get(name,name)+m.group(3)
        text2=re.sub(r"(``?)([A-Za-z_][A-Za-z_0-9]*)((?:\(\))?``?)",tick,text2)
    if text2!=text: (ROOT/f).write_text(text2)
print("edits",total)
