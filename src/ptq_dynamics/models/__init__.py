"""Model construction and the fast forward pass over transformers' own parameters."""
