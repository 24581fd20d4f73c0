"""Rules of operations on images and signals, and the halos that these operations exchange.

The operations are convolution, pooling, interpolation and shifts.
"""
