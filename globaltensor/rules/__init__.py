"""Rules: what each torch function admits. One file per family; `rule` adds more."""

from .choose import Choice, choose
from .notation import Arg, Op, Range, Signature, Split
from .registry import RULES, UNSEEING, Derived, Rule, composite, pointwise, rule, rule_of, spellings_of

__all__ = [
    "RULES", "UNSEEING", "Arg", "Choice", "Derived", "Op", "Range", "Rule", "Signature", "Split",
    "choose", "composite", "pointwise", "rule", "rule_of", "spellings_of",
]  # fmt: skip

# Each family declares its rules when imported.
from . import attention, convolution, elementwise, gather, indexing, kernels, linalg, loss, matmul, multihead, nn, norm, order, pooling, random
from . import packed, rearrange, reduction, resample, scan, shift, softmax, sort, statistics, views
