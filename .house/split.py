import ast

p='globaltensor/_ops/dispatch.py'
src=open(p).read(); L=src.split("\n"); t=ast.parse(src)
body=t.body
# segments: each top-level statement with preceding comments/decorators
spans=[]
for i,n in enumerate(body):
    start=min([n.lineno]+[d.lineno for d in getattr(n,'decorator_list',[])])-1
    while start>0 and L[start-1].startswith("#"): start-=1
    spans.append([start,n.end_lineno,n])
def name(n):
    if isinstance(n,(ast.FunctionDef,ast.ClassDef)): return n.name
    if isinstance(n,ast.Assign): return ",".join(x.id for x in n.targets if isinstance(x,ast.Name))
    if isinstance(n,ast.AnnAssign): return n.target.id
    return ""
PLAN="_Meeting stage_context _common_placement _place_of_scalars lies_at writes _call_on_common_placement _with_scalars plan_call _cut_indices _same _is_ours _build_call_plan _hides_strides _is_list _as_autocast_would _attribute _autocast".split()
FALL="_WARNED _OVERWRITING _plan_without_rule _on_whole _warn_of write_into_plain global_copy copy_back check_out _with_out _put rule check_target _asks_classes".split()
imports_end=max(s[1] for s in spans if isinstance(s[2],(ast.Import,ast.ImportFrom)))
head="\n".join(L[:imports_end])
doc=ast.get_docstring(t,clean=False)
imports="\n".join(L[[s for s in spans if isinstance(s[2],ast.ImportFrom)][0][0]:imports_end])
def take(names):
    out=[]
    for s,e,n in spans:
        if name(n) in names or (isinstance(n,ast.Assign) and name(n) in names): out.append("\n".join(L[s:e]))
    return out
def join(parts):
    text=""
    for x in parts:
        one = not x.lstrip("#@ ").startswith(("def","class")) and "\ndef " not in x and "\nclass " not in x and not x.startswith("@")
        text+=("\n" if one and text.endswith("\n") and not text.endswith("\n\n\n") else "\n\n\n" if text else "")+x+"\n"
    return text
pl,fa=take(PLAN),take(FALL)
open('globaltensor/_ops/plan_call.py','w').write('"""What a cache miss does: from the rule of a function to the plan of a call. `dispatch` keeps the plan by the call\'s key."""\n\n'+imports+"\nfrom .fallback import _on_whole, _plan_without_rule, _warn_of, _with_out, check_out, write_into_plain\n\n__all__ = [\"lies_at\", \"plan_call\", \"stage_context\", \"writes\"]\n\n\n"+join(pl))
open('globaltensor/_ops/fallback.py','w').write('"""Calls beside the rules: functions without one run on whole tensors; results are copied into ``out=`` and into plain targets; what a rule may be declared for."""\n\n'+imports+"\n\n__all__ = [\"check_out\", \"copy_back\", \"global_copy\", \"rule\", \"write_into_plain\"]\n\n\n"+join(fa))
gone=set()
for s,e,n in spans:
    if name(n) in PLAN+FALL: gone.update(range(s,e))
rest=[l for i,l in enumerate(L) if i not in gone]
text="\n".join(rest)
import re

text=re.sub(r"\n# -{20,}[^\n]*\n(?=\s*(\n# -{20,}|$))","\n",text)
text=re.sub(r"\n{4,}","\n\n\n",text).rstrip()+"\n"
text=text.replace("from . import call_plan\n","from . import call_plan\nfrom .plan_call import _autocast, plan_call\n",1)
text=re.sub(r'__all__ = \[[^\]]*\]','__all__ = ["HANDLERS", "dispatch", "fresh_plans"]',text,1)
open(p,'w').write(text)
