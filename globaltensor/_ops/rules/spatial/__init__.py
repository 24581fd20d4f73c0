"""Rules of operations on images and signals: convolution, pooling, interpolation, shifts, and the
halos that they exchange."""
