"""Rules: what each torch function admits. One file per family; `rule` adds more."""

from .strategy import Choice, choose
from .notation import Arg, Op, Range, Signature, Split
from .registry import RULES, UNSEEING, Derived, Rule, composite, pointwise, rule, rule_of, spellings_of

__all__ = [
    "RULES", "UNSEEING", "Arg", "Choice", "Derived", "Op", "Range", "Rule", "Signature", "Split",
    "choose", "composite", "pointwise", "rule", "rule_of", "spellings_of",
]  # fmt: skip

# Each family declares its rules when imported.
from .attention import sdpa, multihead
from .spatial import convolution, pooling
from . import pointwise as elementwise, gather_scatter, indexing, low_level, linalg, loss, matmul, nn_layers, vector_norm, topk, random
from . import packed_sequence, concat, reduction, scan, softmax, sort, statistics, view
from .spatial import interpolate, shift
