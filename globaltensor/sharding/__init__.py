"""Pure values that describe the layout of a tensor over ranks. Every other package uses them."""
