"""``flow.nn.functional``: torch.nn.functional itself. Its stub has the types of this library."""

import sys

import torch.nn.functional

sys.modules[__name__] = torch.nn.functional
