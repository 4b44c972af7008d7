"""Serving: many requests at once over paged keys and values, each answered as if it were alone."""

from riftco.serve.answer import Answer
from riftco.serve.engine import Engine
from riftco.serve.request import Completion, Piece, Request, TokenLogprob

__all__ = ["Answer", "Completion", "Engine", "Piece", "Request", "TokenLogprob"]
