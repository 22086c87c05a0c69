"""Hessian-vector products and what is read off them."""
