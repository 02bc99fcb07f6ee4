"""Texts: documents and tables by name, token ids, retrieval."""
