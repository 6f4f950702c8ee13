"""Prompt lookup: draft what followed the last occurrence of the tokens just seen."""

from specdec_plugin_ngram.speculator import NgramOptions, NgramSpeculator

__all__ = ["NgramOptions", "NgramSpeculator"]
