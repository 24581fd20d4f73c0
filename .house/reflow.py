"""Refill docstrings and comment blocks that are wider than WIDTH. Usage: reflow.py WIDTH FILES..."""
import ast
import re
import sys

W=int(sys.argv[1])
def special(line):
    s=line.strip()
    return (not s or s.startswith((">>>","...","|","- ","* ","#:","..",":","+--","```")) or re.match(r"\d+\. ",s) is not None)
def fill(words,indent,first_prefix=None,width=W,tail=""):
    out=[];cur=(first_prefix if first_prefix is not None else indent)
    start=True
    for w in words:
        cand=cur+("" if start else " ")+w
        if len(cand)>width and not start:
            out.append(cur);cur=indent+w
        else: cur=cand
        start=False
    out.append(cur)
    return out
def reflow_doc(lines,l0,l1):
    """lines[l0:l1] is a docstring literal incl. quotes; returns new lines."""
    text=lines[l0:l1]
    indent=re.match(r"\s*",text[0]).group(0)
    if l1-l0==1:
        m=re.match(r'^(\s*)(r?""")(.*)("""\)?.*)$',text[0])
        if not m or len(text[0])<=W: return text
        body=m.group(3)
        # single line: split into summary sentence(s)
        words=body.split(" ")
        got=fill(words,indent,first_prefix=indent+m.group(2))
        return got+[indent+m.group(4)] if True else text
    out=[];i=0;n=len(text)
    indoctest=False
    while i<n:
        line=text[i]
        if special(line) or (i>0 and len(re.match(r"\s*",line).group(0))>len(indent)):
            # doctest output / code: copy until blank
            if line.strip().startswith((">>>","...")):
                while i<n and text[i].strip() and text[i].strip()!='"""': out.append(text[i]); i+=1
                continue
            out.append(line); i+=1
            continue
        # a paragraph
        j=i
        while j<n and not (j>i and (special(text[j]) or len(re.match(r"\s*",text[j]).group(0))!=len(indent))) and text[j].strip()!='"""': j+=1
        para=text[i:j]
        if j==i: out.append(line); i+=1; continue
        closing=""
        if para[-1].rstrip().endswith('"""') and j==n:
            para=para[:-1]+[para[-1].rstrip()[:-3]]; closing='"""'
        if any(len(p)+len(closing)>W for p in para):
            first=para[0]
            prefix=indent
            words=" ".join(p.strip() for p in para).split(" ")
            got=fill(words,indent)
            if closing:
                if len(got[-1])+3<=W: got[-1]+=closing
                else: got.append(indent+closing)
            out+=got
        else:
            if closing: para[-1]+=closing
            out+=para
        i=j
    return out
for f in sys.argv[2:]:
    s=open(f).read(); lines=s.split("\n"); tree=ast.parse(s)
    spans=[]
    for node in ast.walk(tree):
        if isinstance(node,(ast.Module,ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef)) and node.body and isinstance(node.body[0],ast.Expr) and isinstance(node.body[0].value,ast.Constant) and isinstance(node.body[0].value.value,str):
            e=node.body[0]; spans.append((e.lineno-1,e.end_lineno))
    inside=set()
    for a,b in spans: inside.update(range(a,b))
    # string tokens of other kinds are left alone
    strs=set()
    for node in ast.walk(tree):
        if isinstance(node,(ast.Constant,ast.JoinedStr)) and node.end_lineno!=node.lineno: strs.update(range(node.lineno-1,node.end_lineno))
    out=[];i=0
    start={a:b for a,b in spans}
    while i<len(lines):
        if i in start:
            b=start[i]; out+=reflow_doc(lines,i,b); i=b; continue
        m=re.match(r"^(\s*)(#:? )\S",lines[i])
        if m and i not in strs and len(lines[i])>W:
            ind,mark=m.group(1),m.group(2)
            # collect following comment lines of the same kind
            j=i+1
            while j<len(lines) and lines[j].startswith(ind+mark) and not re.match(r"^\s*#:? (-{3,}|[-*|] )",lines[j]) : j+=1
            if re.match(r"^\s*#:? -{3,}",lines[i]): out.append(lines[i][:W]); i+=1; continue
            words=" ".join(l[len(ind+mark):].strip() for l in lines[i:j]).split(" ")
            out+=fill(words,ind+mark); i=j; continue
        out.append(lines[i]); i+=1
    n="\n".join(out)
    if n!=s:
        ast.parse(n); open(f,"w").write(n)
