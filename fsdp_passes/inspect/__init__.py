"""Seeing what the compiler did: explanations, reports and the command line."""
