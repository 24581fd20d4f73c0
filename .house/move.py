"""Codemod: move modules of the package by a table, rewriting every import, dotted string and path mention. Usage: move.py ROOT TABLE"""
import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(sys.argv[1]).resolve(); TABLE = Path(sys.argv[2])
PKG = "globaltensor"

def dotted(rel):
    rel = rel[:-3] if rel.endswith(".py") else rel
    parts = rel.split("/")
    if parts[-1] == "__init__": parts = parts[:-1]
    return ".".join([PKG, *parts]) if parts and parts != [""] else PKG

rows = []
for line in TABLE.read_text().splitlines():
    if line.startswith("#") or not line.strip(): continue
    a, b, *_ = line.split("\t")
    rows.append((a.strip(), b.strip()))
files = subprocess.run(["git", "-C", str(ROOT), "ls-files", PKG], capture_output=True, text=True).stdout.split()
old_modules = {dotted(f[len(PKG)+1:]) for f in files if f.endswith(".py")}
MOVED = {}       # dotted old -> dotted new
FILES = {}       # rel old -> rel new
for a, b in rows:
    if a.endswith("/"):
        for f in files:
            rel = f[len(PKG)+1:]
            if rel.startswith(a): FILES[rel] = b + rel[len(a):]
        continue
    if a == b: continue
    if f"{PKG}/{a}" not in files:
        print("not there:", a); continue
    FILES[a] = b
    MOVED[dotted(a)] = dotted(b)

def newmod(m):
    return MOVED.get(m, m)

def is_module(m): return m in old_modules

def resolve(node, package):
    if node.level == 0: return node.module
    base = package[: len(package) - node.level + 1]
    return ".".join(base + (node.module.split(".") if node.module else []))

def relative(target, package):
    """relative spelling (dots+module) of absolute module target from a file whose package parts are package"""
    t = target.split(".")
    if t[0] != PKG: return target
    n = 0
    while n < len(package) and n < len(t) and package[n] == t[n]: n += 1
    ups = len(package) - n
    return "." * (ups + 1) + ".".join(t[n:])

def rewrite(path, text, old_pkg, new_pkg, inside):
    tree = ast.parse(text)
    lines = text.split("\n")
    edits = []   # (l0, l1, newlines)
    renames = {} # name in this file -> new name
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)} | {n.name for n in ast.walk(tree) if isinstance(n,(ast.FunctionDef,ast.ClassDef))}
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for a in node.names: imported.add((a.asname or a.name).split(".")[0])
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = resolve(node, old_pkg)
            if base is None or base.split(".")[0] != PKG: continue
            if any(a.name == "*" for a in node.names):
                groups = {newmod(base): [("*", None)]}
            else:
                groups = defaultdict(list)
                for a in node.names:
                    full = f"{base}.{a.name}"
                    if is_module(full):
                        new = newmod(full); parent, _, leaf = new.rpartition(".")
                        if a.asname is None and leaf != a.name:
                            known = a.name
                            if leaf in bound or leaf in imported or leaf in ("random","signal"):
                                groups[parent].append((leaf, known))
                            else:
                                renames[known] = leaf
                                groups[parent].append((leaf, None))
                        else:
                            groups[parent].append((leaf, a.asname if a.asname != leaf else None))
                    else:
                        groups[newmod(base)].append((a.name, a.asname))
            l0, l1 = node.lineno - 1, node.end_lineno
            indent = lines[l0][: len(lines[l0]) - len(lines[l0].lstrip())]
            tail = ""
            last = lines[l1-1]
            m = re.search(r"\s{2}#.*$", last[node.end_col_offset if l1-1 == l0 or True else 0:])
            if m: tail = m.group(0)
            out = []
            for target, names in groups.items():
                spelled = relative(target, new_pkg) if (inside and node.level) else target
                items = ", ".join(n if not s else f"{n} as {s}" for n, s in names)
                line = f"{indent}from {spelled} import {items}"
                if len(line) > 150:
                    line = f"{indent}from {spelled} import (\n" + "".join(f"{indent}    {n if not s else f'{n} as {s}'},\n" for n, s in names) + f"{indent})"
                out.append(line)
            out[-1] += tail
            edits.append((l0, l1, out, node.col_offset))
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
            if any(n.split(".")[0] == PKG and newmod(n) != n for n in names):
                l0 = node.lineno - 1
                line = lines[l0]
                for n in sorted(names, key=len, reverse=True):
                    line = re.sub(rf"\b{re.escape(n)}\b(?!\.)", newmod(n), line)
                edits.append((l0, node.end_lineno, [line], node.col_offset))
    for l0, l1, out, col in sorted(edits, reverse=True):
        if lines[l0][:col].strip():  # a statement after something else on the line
            out[0] = lines[l0][:col] + out[0].lstrip()
        lines[l0:l1] = "\n".join(out).split("\n")
    text = "\n".join(lines)
    if renames:
        text = rename_names(text, renames)
    return text

def rename_names(text, renames):
    """rename Name tokens (not attributes, not keyword argument names) by AST positions"""
    tree = ast.parse(text)
    spots = []
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and n.id in renames: spots.append((n.lineno, n.col_offset, n.id))
    lines = text.split("\n")
    for ln, col, name in sorted(spots, reverse=True):
        b = lines[ln-1].encode()
        assert b[col:col+len(name)].decode() == name, (ln, col, name, lines[ln-1])
        lines[ln-1] = (b[:col] + renames[name].encode() + b[col+len(name):]).decode()
    return "\n".join(lines)

# dotted mentions in strings, docs, configuration
pairs = sorted(MOVED.items(), key=lambda kv: -len(kv[0]))
DOTTED = re.compile("|".join(rf"(?<![\w./])({re.escape(o)})(?=[^\w]|$)" for o, _ in pairs)) if pairs else None
TO = dict(pairs)
def mentions(text):
    if DOTTED is None: return text
    return DOTTED.sub(lambda m: TO[m.group(0)], text)
basenames = defaultdict(list)
for f in files:
    if f.endswith(".py"): basenames[os.path.basename(f)].append(f[len(PKG)+1:])
def path_mentions(text):
    def sub(m):
        rel = m.group(1)
        if rel in FILES: return FILES[rel]
        if "/" not in rel and len(basenames.get(rel, [])) == 1 and basenames[rel][0] in FILES:
            return FILES[basenames[rel][0]]
        for f in FILES:
            if f.endswith("/" + rel) and "/" in rel: return FILES[f]
        return rel
    return re.sub(r"(?<![\w./-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b", sub, text)

def strings_and_comments(text, fn):
    out, last = [], (1, 0)
    lines = text.splitlines(keepends=True)
    starts = [0]
    for l in lines: starts.append(starts[-1] + len(l))
    pos = lambda p: starts[p[0]-1] + p[1]
    pieces, at = [], 0
    for tok in tokenize.generate_tokens(io.StringIO(text).readline):
        if tok.type in (tokenize.STRING, tokenize.COMMENT) or tok.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            a, b = pos(tok.start), pos(tok.end)
            pieces.append(text[at:a]); pieces.append(fn(text[a:b])); at = b
    pieces.append(text[at:])
    return "".join(pieces)

everything = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True).stdout.split()
new_texts = {}
for f in everything:
    p = ROOT / f
    if f.endswith(".py"):
        text = p.read_text()
        inside = f.startswith(PKG + "/")
        rel = f[len(PKG)+1:] if inside else None
        if inside:
            old_pkg = [PKG, *rel.split("/")[:-1]]
            new_rel = FILES.get(rel, rel)
            new_pkg = [PKG, *new_rel.split("/")[:-1]]
        else:
            old_pkg = new_pkg = []
        text = rewrite(f, text, old_pkg, new_pkg, inside)
        text = strings_and_comments(text, lambda s: path_mentions(mentions(s)))
        # attribute chains globaltensor.a.b outside strings
        text = mentions(text)
        new_texts[f] = text
    elif f.endswith((".md", ".toml", ".cfg", ".sh")) or f in ("Makefile", ".ci/run", ".ci/install"):
        text = p.read_text()
        new_texts[f] = mentions(text)
for f, text in new_texts.items():
    p = ROOT / f
    if p.read_text() != text: p.write_text(text)
for a, b in FILES.items():
    src, dst = ROOT / PKG / a, ROOT / PKG / b
    dst.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "-C", str(ROOT), "mv", str(src), str(dst)], check=True)
print("moved", len(FILES))
