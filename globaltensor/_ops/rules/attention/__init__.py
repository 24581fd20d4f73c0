"""Rules of attention: scaled dot products, rings over the sequence, the multi-head kernel."""
