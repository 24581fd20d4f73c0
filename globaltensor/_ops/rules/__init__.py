"""The rules that state which signatures each torch function admits, one file per family.

Dispatch, graphs and the search look rules up here. `rule` declares further ones.
"""

from .strategy import SignatureChoice, select_signature
from .notation import Arg, OpDescription, Range, Signature, LocalContext
from .registry import (
    RULES,
    DATA_FREE_VARIANTS,
    Derived,
    Rule,
    composite,
    rule,
    rule_of,
    spellings_of,
)

__all__ = [
    "DATA_FREE_VARIANTS",
    "RULES",
    "Arg",
    "Derived",
    "LocalContext",
    "OpDescription",
    "Range",
    "Rule",
    "Signature",
    "SignatureChoice",
    "composite",
    "rule",
    "rule_of",
    "select_signature",
    "spellings_of",
]  # fmt: skip

# Each family declares its rules when imported. Some families extend rules of an earlier one, so the
# order of these imports matters.
from . import pointwise
from .attention import sdpa
from .spatial import convolution, pooling
from . import gather_scatter, indexing, low_level, linalg, loss, matmul
from .attention import multihead
from . import (
    normalization,
    dropout,
    recurrent,
    vector_norm,
    topk,
    random,
    packed_sequence,
    concat,
    reduction,
)
from .spatial import interpolate
from . import scan
from .spatial import shift
from . import softmax, sort, statistics, view
