"""Corpora as documents with stable ids in a seeded order; no torch, nothing heavy at import."""

from forward_influence.data.documents import Corpus, Document, TokenizedDocument, TokenizedDocuments
from forward_influence.data.errors import DataError
from forward_influence.data.load import describe_corpora, load_documents

__all__ = [
    "Corpus",
    "DataError",
    "Document",
    "TokenizedDocument",
    "TokenizedDocuments",
    "describe_corpora",
    "load_documents",
]
