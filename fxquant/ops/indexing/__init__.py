"""Operators that read or write at computed positions: indexing, gather and scatter, sorting and top-k, embeddings, counting."""
